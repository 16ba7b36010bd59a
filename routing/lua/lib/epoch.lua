-- epoch: whether the room is complete, and still the one that was filled.  A Redis that was started again, or a replica
-- that has become the master, may lack the last moments; both have another replication id than the one that was filled.

-- What changes whenever another process, or another copy of the data, answers; "": this server does not say.
local function copy_id()
  local info = redis.pcall("INFO", "replication")
  return type(info) == "string" and string.match(info, "master_replid:(%w+)") or ""
end

-- Nothing is offered in a room that is not: whose turn it is, and which slot is free, is not known there (ORDER-1).
local function is_open()
  local found = redis.call("HMGET", META, "epoch", "copy")
  return found[1] and found[2] == copy_id()
end

-- Whether the room is another record's; "": the caller's does not say what it is.
local function is_foreign(record)
  local known = redis.call("HGET", META, "record")
  return record ~= "" and known and known ~= "" and known ~= record
end

-- Somebody has seen `offers` made since this very filling.  If there are fewer, some have been lost: the room is closed
-- until it is filled again.
local function heed_loss(epoch, offers)
  local found = redis.call("HMGET", META, "epoch", "offers")
  if not found[1] or found[1] ~= epoch or tonumber(found[2] or "0") >= offers then return end
  redis.call("HDEL", META, "epoch")
  redis.call("HSET", META, "lost", "1")
end
