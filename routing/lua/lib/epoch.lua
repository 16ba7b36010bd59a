-- epoch: whether a fleet's queue is complete, and still the one that was filled.  A Redis that was restarted, or a
-- replica that was promoted, may lack its last moments; its replication id differs from the one under which it was
-- filled.
-- @include lib/hash_cache
-- @include lib/keys

local known_replication_id, asked_ms = "", -1
-- A value of the field `lost`: leases may be missing.  "waiting": only what waits is wrong, as after another policy.
local LOST = "leases"

-- Return the replication id, which changes whenever another process, or another copy of the data, answers; "": this
-- server has none.
local function replication_id()
  local info = redis.pcall("INFO", "replication")
  return type(info) == "string" and string.match(info, "master_replid:(%w+)") or ""
end

-- The same, at most 100 ms old: INFO costs too much for each offer.  A master that is demoted and promoted again within
-- this time cannot have been filled by another process in between.
local function recent_replication_id(now)
  if asked_ms < 0 or now < asked_ms or now >= asked_ms + 100 then
    known_replication_id, asked_ms = replication_id(), now
  end
  return known_replication_id
end

-- Return whether the queue is complete.  If not, nothing is offered, for whose turn it is and which slot is free are
-- unknown (ORDER-1).  Without `now`, INFO is asked.
local function is_open(now)
  load_fields(META, "epoch", "number", "copy", "offers", "excess", "many_kinds")
  local id = get_field(META, "epoch") and (now and recent_replication_id(now) or replication_id())
  return id and get_field(META, "copy") == id
end

-- Return whether the queue was filled from another database; "": the caller does not name its own.
local function is_other_database(database_id)
  local known = redis.call("HGET", META, "record")
  return database_id ~= "" and known and known ~= "" and known ~= database_id
end

-- A caller has seen `offers` made since the queue was filled as `epoch`.  If Redis knows of fewer, it has lost some:
-- close the queue until it is filled again.
local function close_if_offers_were_lost(epoch, offers)
  load_fields(META, "epoch", "number", "copy", "offers", "excess", "many_kinds")
  local is_same = get_field(META, "epoch") and get_field(META, "epoch") == epoch
  if not is_same or get_number(META, "offers") >= offers then return end
  set_field(META, "epoch", false)
  set_field(META, "lost", LOST)
end

-- Close the queue, although no lease was lost, so that the waiting jobs are enqueued again.
local function close_for_refill()
  redis.call("HDEL", META, "epoch")
  redis.call("HSETNX", META, "lost", "waiting")
end
