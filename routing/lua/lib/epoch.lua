-- epoch: whether the room is complete, and still the one that was filled.  A Redis that was started again, or a replica
-- that has become the master, may lack the last moments; both have another replication id than the one that was filled.

-- What this process of Redis said last, and when: it costs too much to ask with each offer.  Another process knows
-- nothing yet.  One that stops being the master and becomes it again in less time than this had nobody fill its room.
local ASKED_AGAIN_MS = 100
local copy_known, copy_asked_ms = "", -1

-- What changes whenever another process, or another copy of the data, answers; "": this server does not say.
local function copy_id()
  local info = redis.pcall("INFO", "replication")
  return type(info) == "string" and string.match(info, "master_replid:(%w+)") or ""
end

-- The same, as it was a moment ago.
local function copy_lately(now)
  if copy_asked_ms < 0 or now < copy_asked_ms or now >= copy_asked_ms + ASKED_AGAIN_MS then
    copy_known, copy_asked_ms = copy_id(), now
  end
  return copy_known
end

-- Nothing is offered in a room that is not: whose turn it is, and which slot is free, is not known there (ORDER-1).
-- Without `now` the server is asked anew.
local function is_open(now)
  read_fields(META, "epoch", "copy", "offers", "excess")
  return field(META, "epoch") and field(META, "copy") == (now and copy_lately(now) or copy_id())
end

-- Whether the room is another record's; "": the caller's does not say what it is.
local function is_foreign(record)
  local known = redis.call("HGET", META, "record")
  return record ~= "" and known and known ~= "" and known ~= record
end

-- Somebody has seen `offers` made since this very filling.  If there are fewer, some have been lost: the room is closed
-- until it is filled again.
local function heed_loss(epoch, offers)
  read_fields(META, "epoch", "copy", "offers", "excess")
  local is_known = field(META, "epoch") and field(META, "epoch") == epoch
  if not is_known or number_in_field(META, "offers") >= offers then return end
  set_field(META, "epoch", false)
  set_field(META, "lost", "1")
end
