--[[ rate_limit: whether a tenant may submit `count` more jobs now, by the generic cell rate algorithm.
  Key: a string, when the next submit is due by the rate, ms with fractions
  Takes
    count: int
    interval_ms: number     between two submits
    burst: int              submits at once
  Returns
    wait_ms: int            until they would be admitted; 0: they are
  Writes only when admitted
  Refused when Redis is full
  Called by routing/admission/submit_limits.py: LimitContext.rate_limit_command
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local now, burst_ms = now_ms(), burst * interval_ms
-- It is further ahead than the burst only if the clock was set back.
local due = math.min(math.max(tonumber(redis.call("GET", KEYS[1]) or "0"), now), now + burst_ms)
local wanted = due + count * interval_ms
local wait = wanted - now - burst_ms
if wait > 0 then return math.ceil(wait) end

redis.call("SET", KEYS[1], string.format("%.3f", wanted), "PX", math.ceil(wanted - now) + 1000)
return 0
