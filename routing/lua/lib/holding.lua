-- holding: a slot comes to be held by a job, and ceases to be.

-- Leases of a server that have no slot have become more, or less: so many fewer of its slots are offered (SLOT-1).
local function count_excess(server, change)
  if redis.call("HINCRBY", excess_key(), server, change) <= 0 then redis.call("HDEL", excess_key(), server) end
  set_field(META, "excess", redis.call("EXISTS", excess_key()) == 1 and "1")
end

-- A slot has one holder.  Only after Redis has lost what it knew, a run can come back to a slot that was given away
-- meanwhile: its lease stands beside the holder's, and gets the slot as soon as that is dropped.
local function hold_slot(slot, job)
  local holder = field(SLOTS, slot)
  if holder == job then return end
  if holder then redis.call("RPUSH", beside_key(slot), job) else set_field(SLOTS, slot, job) end
  if holder or is_beyond(slot) then count_excess(server_of(slot), 1) end
end

-- One lease less of a slot that has several, or is none any more: one less that has no slot.  Answers whether it holds
-- none now.
local function let_slot_go(slot, job)
  local may_have_beside = field(META, "excess")
  if may_have_beside and (redis.call("LLEN", beside_key(slot)) > 0 or is_beyond(slot)) then
    count_excess(server_of(slot), -1)
  end
  if field(SLOTS, slot) ~= job then
    redis.call("LREM", beside_key(slot), 0, job)
    return false
  end
  local heir = may_have_beside and redis.call("LPOP", beside_key(slot))
  set_field(SLOTS, slot, heir or false)
  return not heir
end

-- Of a server that is not here nothing is kept once it holds no lease.
local function count_taken(server, change)
  local stats = stats_key("server", server)
  read_hash(stats) -- Who lets a slot go, or takes one, asks for more of it.
  if add_to_field(stats, "taken", change) <= 0 and not field(SERVERS, server) then forget_hash(stats) end
end

-- Write a lease: `job` holds `slot` from now on.  Its constraints are kept as `needs`.  `expires` nil: that is known.
local function write_lease(job, name, owner, slot, lane, constraints, seq, created, number, charged, now, expires)
  redis.call("HSET", lease_key(job), "lease", name, "owner", owner, "slot", slot, "lane", lane.name, "needs",
    constraints, "seq", seq, "created", created, "offer", number, "since", now, "charged", exact(charged))
  if expires then redis.call("ZADD", LEASES, expires, job) end
  hold_slot(slot, job)
  count_taken(server_of(slot), 1)
  if owner == "" then note_owner(job, owner, number) end
  count_held(lane, 1)
end

-- Of a server of several models: only a run that has ended well proves that it has loaded that run's.
local function doubt_loaded(was)
  local server = server_of(was.slot)
  local entry, stats = field(SERVERS, server), stats_key("server", server)
  if entry and serves_several(entry) and field(stats, "loaded") == was.lane.model then
    set_field(stats, "loaded", false)
  end
end

-- Remove a lease, as read_lease has answered it.  Answers whether its slot holds none now.
local function drop_lease(was, now)
  read_fields(META, "epoch", "copy", "offers", "excess", "waiting:" .. was.lane.model)
  read_rules(was.lane)
  redis.call("DEL", lease_key(was.job))
  redis.call("ZREM", LEASES, was.job)
  if was.owner == "" then note_owner(was.job, "gone") end
  local is_let_go = let_slot_go(was.slot, was.job)
  count_taken(server_of(was.slot), -1)
  local policy = policy_of(was.lane.model)
  if policy.charge_end then policy.charge_end(was.lane, now - was.since - was.charged) end
  count_held(was.lane, -1)
  return is_let_go
end
