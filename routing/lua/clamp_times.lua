--[[ clamp_times: end what would last longer than it may, as Redis' clock was set back.
  Keys: rules, cooling, leases, servers, stats
  Takes
    lease_ms: int     longest duration of a lease or an offer; one that would last longer gets this, so that its holder
                      can renew it
    cooldown_ms: int      longest cooldown of a slot
    open_ms: int      longest time for which a breaker is open
  Returns
    moved: int        how many times were too far ahead
  Called by routing/queue/fleets.py: Fleets.clamp_times
  Clock Redis TIME    Cost O(log n + what is moved + servers models) ]]
-- @include lib/keys
-- @include lib/now_ms

local now, moved = now_ms(), 0

local function list_beyond(index, longest_ms)
  return redis.call("ZRANGEBYSCORE", index, "(" .. integer_text(now + longest_ms), "+inf")
end

for _, job in ipairs(list_beyond(LEASES, lease_ms)) do
  redis.call("ZADD", LEASES, integer_text(now + lease_ms), job)
  local since = redis.call("HGET", lease_key(job), "since")
  if since and tonumber(since) > now then redis.call("HSET", lease_key(job), "since", integer_text(now)) end
  moved = moved + 1
end
for _, slot in ipairs(list_beyond(COOLING, cooldown_ms)) do
  redis.call("ZADD", COOLING, integer_text(now), slot)
  moved = moved + 1
end

-- Set a time that is too far ahead to now.
local function clamp(stats, field, longest_ms)
  local at_ms = redis.call("HGET", stats, field)
  if at_ms and tonumber(at_ms) > now + longest_ms then
    redis.call("HSET", stats, field, integer_text(now))
    moved = moved + 1
  end
end

local function clamp_all(stats)
  clamp(stats, "open_until", open_ms)
  clamp(stats, "penalty_at", 0)
  clamp(stats, "away_since", 0)
  clamp(stats, "silent_since", 0)
end

local models = {}
for _, field in ipairs(redis.call("HKEYS", RULES)) do
  local model = string.match(field, "^model (.*)$")
  if model then
    models[#models + 1] = model
    clamp_all(stats_key("model", model))
  end
end
for _, server in ipairs(redis.call("HKEYS", SERVERS)) do
  clamp_all(stats_key("server", server))
  for _, model in ipairs(models) do clamp(stats_key("server", server), "passing:" .. model, 0) end
end
return moved
