--[[ pull_back: after Redis' clock was set back, end what would last longer than it ever may.
  Keys: rules, cooling, leases, servers, stats
  Takes
    lease_ms: int     the longest that a lease or an offer lasts: one that would last longer gets that, so that its
                      holder can renew it
    cooldown_ms: int      the longest cooldown of a slot
    open_ms: int      the longest that a breaker stays open
  Returns
    moved: int        how many were pulled back
  Clock Redis TIME    Cost O(log n + what is pulled back + servers models) ]]
-- @include lib/now_ms
-- @include lib/fleet

local now, moved = now_ms(), 0

local function beyond(index, longest_ms)
  return redis.call("ZRANGEBYSCORE", index, "(" .. exact(now + longest_ms), "+inf")
end

for _, job in ipairs(beyond(LEASES, lease_ms)) do
  redis.call("ZADD", LEASES, exact(now + lease_ms), job)
  moved = moved + 1
end
for _, slot in ipairs(beyond(COOLING, cooldown_ms)) do
  redis.call("ZADD", COOLING, exact(now), slot)
  moved = moved + 1
end

-- A moment that lies further ahead than it can becomes now.
local function pull(stats, field, longest_ms)
  local at = redis.call("HGET", stats, field)
  if at and tonumber(at) > now + longest_ms then
    redis.call("HSET", stats, field, exact(now))
    moved = moved + 1
  end
end

local function pull_all(stats)
  pull(stats, "open_until", open_ms)
  pull(stats, "penalty_at", 0)
  pull(stats, "away_since", 0)
end

local models = {}
for _, field in ipairs(redis.call("HKEYS", RULES)) do
  local model = string.match(field, "^model (.*)$")
  if model then
    models[#models + 1] = model
    pull_all(stats_key("model", model))
  end
end
for _, server in ipairs(redis.call("HKEYS", SERVERS)) do
  pull_all(stats_key("server", server))
  for _, model in ipairs(models) do pull(stats_key("server", server), "passing:" .. model, 0) end
end
return moved
