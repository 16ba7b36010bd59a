--[[ admit: may a tenant submit `count` more jobs now?  A generic cell rate algorithm: one number a tenant.
  KEYS[1] rate      string  when the next submit is due by the rate, ms with fractions
  ARGV[1] count     ARGV[2] interval_ms between two submits   ARGV[3] burst: submits at once
  Returns 0: admitted | ms to wait until they would be      Writes only when admitted
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local now, interval = now_ms(), tonumber(ARGV[2])
local burst_ms = tonumber(ARGV[3]) * interval
-- Further ahead than the burst it can only be because the clock was set back.
local due = math.min(math.max(tonumber(redis.call("GET", KEYS[1]) or "0"), now), now + burst_ms)
local wanted = due + tonumber(ARGV[1]) * interval
local wait = wanted - now - burst_ms
if wait > 0 then return math.ceil(wait) end

redis.call("SET", KEYS[1], string.format("%.3f", wanted), "PX", math.ceil(wanted - now) + 1000)
return 0
