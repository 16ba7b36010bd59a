-- holding: a slot comes to be held by a job, and ceases to be.

-- Charge what a run has used of its slot beyond what has been charged; answers what has been charged then.
local function charge_use(it, since, charged, now)
  if rules_of(it.model).policy == "fair" then charge(it.tenant, it.model, now - since - charged) end
  return now - since
end

-- Leases of a server beyond its slots have become more, or less: so many fewer of those are offered (SLOT-1).
local function count_excess(server, change)
  if redis.call("HINCRBY", excess_key(), server, change) <= 0 then redis.call("HDEL", excess_key(), server) end
end

-- A slot has one holder.  Only after Redis has lost what it knew, a run can come back to a slot that was given away
-- meanwhile: its lease stands beside the holder's, and gets the slot as soon as that is dropped.
local function hold_slot(slot, job)
  local holder = redis.call("HGET", SLOTS, slot)
  if holder and holder ~= job then
    redis.call("RPUSH", beside_key(slot), job)
    count_excess(server_of(slot), 1)
  end
  if not holder then redis.call("HSET", SLOTS, slot, job) end
end

local function let_slot_go(slot, job)
  if redis.call("EXISTS", excess_key()) == 1 and is_beyond(slot) then count_excess(server_of(slot), -1) end
  if redis.call("HGET", SLOTS, slot) ~= job then
    if redis.call("LREM", beside_key(slot), 0, job) > 0 then count_excess(server_of(slot), -1) end
    return
  end
  local heir = redis.call("LPOP", beside_key(slot))
  if heir then count_excess(server_of(slot), -1) end
  if heir then redis.call("HSET", SLOTS, slot, heir) else redis.call("HDEL", SLOTS, slot) end
end

-- Of a server that is not here nothing is kept once it holds no lease.
local function count_taken(server, change)
  local stats = stats_key("server", server)
  if redis.call("HINCRBY", stats, "taken", change) <= 0 and redis.call("HEXISTS", SERVERS, server) == 0 then
    redis.call("UNLINK", stats)
  end
end

-- Write a lease: `job` holds `slot` from now on.
local function write_lease(job, lease, owner, slot, it, needs, seq, created, number, charged, now, expires)
  redis.call("HSET", lease_key(job), "lease", lease, "owner", owner, "slot", slot, "lane", it.name, "needs", needs,
    "seq", seq, "created", created, "offer", number, "since", exact(now), "charged", exact(charged))
  redis.call("ZADD", LEASES, exact(expires), job)
  hold_slot(slot, job)
  redis.call("ZREM", FREE, slot)
  redis.call("ZREM", RESTING, slot)
  count_taken(server_of(slot), 1)
  note_owner(job, owner, number)
  count_held(it, 1)
end

-- Remove the lease; answers where the job stood, which slot it had, and for how long.
local function drop_lease(job, now)
  local was = redis.call("HMGET", lease_key(job), "slot", "lane", "needs", "seq", "created", "since", "charged")
  local it, since = read_lane(was[2]), tonumber(was[6])
  redis.call("DEL", lease_key(job))
  redis.call("ZREM", LEASES, job)
  redis.call("ZREM", open_key(), job)
  let_slot_go(was[1], job)
  count_taken(server_of(was[1]), -1)
  charge_use(it, since, tonumber(was[7]), now)
  count_held(it, -1)
  return { slot = was[1], lane = it, needs = was[3], seq = was[4], created = was[5], held_ms = now - since }
end
