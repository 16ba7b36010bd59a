-- fleet: names for the keys that every script gets, and the acts that several scripts share.
-- An index and its members go by one rule: the key of a member is <key of the index>:<member>.
local LANES, OFFSETS, FREE, RESTING = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local SLOTS, LEASES, SERVERS, META = KEYS[5], KEYS[6], KEYS[7], KEYS[8]

local function lane_key(lane) return LANES .. ":" .. lane end
local function lease_key(job) return LEASES .. ":" .. job end
local function server_of(slot) return string.match(slot, "^(.*)%-slot%d+$") end
local function model_of(lane) return string.match(lane, "|([^|]*)$") end

-- Order keys are integers below 2^53; tostring() would round them to 14 digits.
local function exact(number) return string.format("%.0f", number) end

-- Set a lane's place in the index by the job at its head; drop the lane when it is empty.
local function reindex(lane)
  local head = redis.call("ZRANGE", lane_key(lane), 0, 0, "WITHSCORES")
  if head[1] then
    local offset = tonumber(redis.call("HGET", OFFSETS, lane) or "0")
    redis.call("ZADD", LANES, exact(offset + tonumber(head[2])), lane)
  else
    redis.call("ZREM", LANES, lane)
    redis.call("HDEL", OFFSETS, lane)
  end
end

local function put_in_lane(lane, offset, seq, job)
  redis.call("HSET", OFFSETS, lane, offset)
  redis.call("ZADD", lane_key(lane), seq, job)
  reindex(lane)
end

-- A server's entry reads "<state> <slots>\n<model>\n<model>…\n", so that no script has to parse JSON.
-- Answers nil unless the server is online and this is one of its slots.
local function online_entry(slot)
  local entry = redis.call("HGET", SERVERS, server_of(slot))
  local slots = entry and tonumber(string.match(entry, "^online (%d+)\n"))
  if slots and tonumber(string.match(slot, "(%d+)$")) < slots then return entry end
end

local function serves(entry, model) return string.find(entry, "\n" .. model .. "\n", 1, true) ~= nil end

-- Let a slot that holds nothing be offered: now, or after it has rested.  A slot of a server that is not
-- online is offered to nobody; sync_servers brings it back.
local function return_slot(slot, now, rest_ms)
  if not online_entry(slot) then return end
  if rest_ms > 0 then
    redis.call("ZADD", RESTING, exact(now + rest_ms), slot)
  else
    redis.call("ZADD", FREE, exact(now), slot)
  end
end

local function wake_rested(now)
  local rested = redis.call("ZRANGEBYSCORE", RESTING, "-inf", exact(now), "LIMIT", 0, 100)
  for _, slot in ipairs(rested) do
    redis.call("ZREM", RESTING, slot)
    return_slot(slot, now, 0)
  end
end
