-- offer: the job whose turn it is and a slot that may run it, taken together or not at all (SLOT-2, LEASE-1).

local PAGE = 256 -- lanes or slots read at once; nearly always the first of them will do

-- The first lane in order whose model this server serves; its head is the job whose turn it is.
local function next_lane(entry)
  for start = 0, redis.call("ZCARD", LANES) - 1, PAGE do
    for _, lane in ipairs(redis.call("ZRANGE", LANES, start, start + PAGE - 1)) do
      if serves(entry, model_of(lane)) then return lane end
    end
  end
end

-- Take the head of `lane` and the free `slot`, and write the lease.  `owner` "" leaves it open for whoever
-- claims it before it expires.
local function take(lane, slot, prefix, owner, now, lease_ms)
  local head = redis.call("ZRANGE", lane_key(lane), 0, 0, "WITHSCORES")
  local job, seq, offset = head[1], head[2], redis.call("HGET", OFFSETS, lane) or "0"
  local number = redis.call("HINCRBY", META, "offers", 1)
  local lease = prefix .. "-" .. number
  redis.call("ZREM", lane_key(lane), job)
  reindex(lane)
  redis.call("ZREM", FREE, slot)
  redis.call("HSET", SLOTS, slot, job)
  redis.call("ZADD", LEASES, exact(now + lease_ms), job)
  redis.call("HSET", lease_key(job), "lease", lease, "owner", owner, "slot", slot, "lane", lane, "offset", offset,
    "seq", seq, "offer", number)
  return { job, lease, slot, server_of(slot), model_of(lane), number, owner }
end

-- Up to `limit` offers.  The first goes straight to `owner`, if there is one, for `lease_ms`; the others are
-- open for `offer_ms`.  Nothing is offered while the room is being rebuilt: META has no epoch then (ORDER-1).
local function make_offers(limit, prefix, now, offer_ms, owner, lease_ms)
  local offers = {}
  if redis.call("HEXISTS", META, "epoch") == 0 then return offers end
  wake_rested(now)
  if limit < 1 or redis.call("EXISTS", LANES) == 0 then return offers end
  local idle = {} -- servers that no waiting job needs; lanes only go during a call, so one look will do
  local passed = 0 -- free slots that were looked at and left
  repeat
    local page = redis.call("ZRANGE", FREE, passed, passed + PAGE - 1)
    for _, slot in ipairs(page) do
      local server = server_of(slot)
      local entry = not idle[server] and online_entry(slot)
      local lane = entry and next_lane(entry)
      if lane then
        local taker, ttl = "", offer_ms
        if #offers == 0 and owner ~= "" then taker, ttl = owner, lease_ms end
        offers[#offers + 1] = take(lane, slot, prefix, taker, now, ttl)
        if #offers >= limit or redis.call("EXISTS", LANES) == 0 then return offers end
      else
        if entry then idle[server] = true end
        passed = passed + 1
      end
    end
  until #page < PAGE
  return offers
end
