-- leases: read, write and delete leases of slots.
-- @include lib/lanes
-- @include lib/slots

-- The name of a lease begins with the epoch of its queue: the database stores a start only under the newest.
local function lease_name(name) return (get_field(META, "number") or "0") .. "." .. name end

-- LEASE-4: only the holder, who knows the lease's name and its owner, renews or releases it.
local function is_holder(lease, name, owner) return lease and lease.name == name and lease.owner == owner end

local function is_held_by(job, name, owner)
  local found = redis.call("HMGET", lease_key(job), "lease", "owner")
  return is_holder({ name = found[1], owner = found[2] }, name, owner)
end

-- Return a job's lease; nil: it has none.  `changes_model`: its server has to load the job's model, as far as is known.
local function read_lease(job)
  local found = redis.call("HMGET", lease_key(job), "lease", "owner", "slot", "lane", "needs", "seq", "created",
    "offer", "since", "charged", "again", "swap")
  if not found[1] then return nil end
  return { job = job, name = found[1], owner = found[2], slot = found[3], lane = parse_lane(found[4]),
    constraints = found[5], seq = found[6], created = found[7], offer = found[8], since = tonumber(found[9]),
    charged = tonumber(found[10]), again = found[11], changes_model = found[12] == "1" or found[8] == "0" }
end

-- An offer is open as long as its lease has no owner.
local function update_open_offers(job, owner, number)
  if owner == "" then
    redis.call("ZADD", open_offers_key(), number, job)
  else
    redis.call("ZREM", open_offers_key(), job)
  end
end

-- A server has one more, or one fewer, lease without a slot: as many of its free slots are not offered (SLOT-1).
local function add_excess(server, change)
  if redis.call("HINCRBY", excess_key(), server, change) <= 0 then redis.call("HDEL", excess_key(), server) end
  set_field(META, "excess", redis.call("EXISTS", excess_key()) == 1 and "1")
end

-- A slot has one holder.  Only after Redis has lost leases, a run can come back to a slot that was given to another job
-- meanwhile: its lease is displaced, and gets the slot when the holder's is deleted.
local function assign_slot(slot, job)
  local holder = get_field(SLOTS, slot)
  if holder == job then return end
  if holder then redis.call("RPUSH", displaced_key(slot), job) else set_field(SLOTS, slot, job) end
  if holder or is_removed_slot(slot) then add_excess(server_of(slot), 1) end
end

-- Take a slot from a job; the first displaced lease gets it.  Returns whether the slot holds no lease now.
local function unassign_slot(slot, job)
  local may_be_displaced = get_field(META, "excess")
  if may_be_displaced and (redis.call("LLEN", displaced_key(slot)) > 0 or is_removed_slot(slot)) then
    add_excess(server_of(slot), -1)
  end
  if get_field(SLOTS, slot) ~= job then
    redis.call("LREM", displaced_key(slot), 0, job)
    return false
  end
  local heir = may_be_displaced and redis.call("LPOP", displaced_key(slot))
  set_field(SLOTS, slot, heir or false)
  return not heir
end

-- Nothing is kept of a server that is not registered once it holds no lease.
local function add_taken(server, change)
  local stats = stats_key("server", server)
  load_hash(stats) -- The callers read more of its fields.
  if increment_field(stats, "taken", change) <= 0 and not get_field(SERVERS, server) then delete_hash(stats) end
end

-- Write a lease: `job` holds `slot` from now on.  The field `needs` holds its constraints.  `expires` nil: the caller
-- has set it.
local function write_lease(job, name, owner, slot, lane, constraints, seq, created, number, charged, now, expires)
  redis.call("HSET", lease_key(job), "lease", name, "owner", owner, "slot", slot, "lane", lane.name, "needs",
    constraints, "seq", seq, "created", created, "offer", number, "since", now, "charged", integer_text(charged))
  if expires then redis.call("ZADD", LEASES, expires, job) end
  assign_slot(slot, job)
  add_taken(server_of(slot), 1)
  if owner == "" then update_open_offers(job, owner, number) end
  add_held(lane, 1)
end

-- Of a server of several models, only a run that ended well proves that it has loaded the run's model.
local function clear_loaded_model(lease)
  local server = server_of(lease.slot)
  local entry, stats = get_field(SERVERS, server), stats_key("server", server)
  if entry and serves_several(entry) and get_field(stats, "loaded") == lease.lane.model then
    set_field(stats, "loaded", false)
  end
end

-- If a lease that is still held is past its end, Redis' clock was set forward: time after the end does not count as
-- time in which the slot was used.
local function renew_lease(job, now, lease_ms)
  local ends = redis.call("ZSCORE", LEASES, job)
  if ends and tonumber(ends) < now then
    redis.call("HINCRBY", lease_key(job), "since", integer_text(now - tonumber(ends)))
  end
  redis.call("ZADD", LEASES, integer_text(now + lease_ms), job)
end

local function get_used_ms(lease, now)
  local ends = redis.call("ZSCORE", LEASES, lease.job)
  return math.max(math.min(now, tonumber(ends or now)) - lease.since, 0)
end

-- Delete a lease that read_lease has returned.
-- Returns whether its slot holds no lease now, and how long the lease has held its slot, ms.
local function delete_lease(lease, now)
  load_fields(META, "epoch", "number", "copy", "offers", "excess", "waiting:" .. lease.lane.model)
  load_rules(lease.lane)
  local used_ms = get_used_ms(lease, now)
  redis.call("DEL", lease_key(lease.job))
  redis.call("ZREM", LEASES, lease.job)
  if lease.owner == "" then update_open_offers(lease.job, "gone") end
  local holds_no_lease = unassign_slot(lease.slot, lease.job)
  add_taken(server_of(lease.slot), -1)
  local policy = policy_of(lease.lane.model)
  if policy.charge_end then policy.charge_end(lease.lane, used_ms - lease.charged) end
  add_held(lease.lane, -1)
  return holds_no_lease, used_ms
end
