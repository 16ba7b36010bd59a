--[[ rate_limit: whether a tenant may submit more jobs now, by the generic cell rate algorithm, in one rate or several.
  Key: a hash, name of a rate -> when the next submit is due by it, ms with fractions
  Takes
    buckets: [{name: text,            of the rate
               jobs: int,
               interval_ms: number,   between two submits
               burst: int}]           submits at once
  Returns
    answers: [{wait_ms: int,          until they would be admitted; 0: this rate admits them
               left: int}]            submits that may follow at once
  Writes only when all admit: what one rate refuses is not counted by another
  Refused when Redis is full
  Called by routing/admission/submit_limits.py: LimitContext.rate_limit_command
  Clock Redis TIME    Cost O(rates) ]]
-- @include lib/now_ms

local now, before, due, waits, is_refused = now_ms(), {}, {}, {}, false

for n, bucket in ipairs(buckets) do
  local burst_ms = bucket.burst * bucket.interval_ms
  -- It is further ahead than the burst only if the clock was set back.
  local stored = tonumber(redis.call("HGET", KEYS[1], bucket.name) or "0")
  before[n] = math.min(math.max(stored, now), now + burst_ms)
  due[n] = before[n] + bucket.jobs * bucket.interval_ms
  waits[n] = math.max(math.ceil(due[n] - now - burst_ms), 0)
  is_refused = is_refused or waits[n] > 0
end

local answers, last = {}, now
for n, bucket in ipairs(buckets) do
  local counted = is_refused and before[n] or due[n]
  local left = (now - counted) / bucket.interval_ms + bucket.burst
  answers[n] = { waits[n], math.floor(left + 1e-6) } -- The fractions of a sum may miss a whole number.
  if not is_refused then redis.call("HSET", KEYS[1], bucket.name, string.format("%.3f", counted)) end
  last = math.max(last, counted)
end
if is_refused then return answers end

local left_ms = math.ceil(last - now) + 1000
if redis.call("PTTL", KEYS[1]) < left_ms then redis.call("PEXPIRE", KEYS[1], left_ms) end
return answers
