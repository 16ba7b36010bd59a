-- server_stats: the breaker, failure penalty and score of servers and models.  A breaker opens when runs fail
-- one after another; after a while exactly one job probes the server.  Its state is in Redis beside the offers, so that
-- all processes share it.
-- @include lib/slots

local SMOOTHING = 0.1 -- share of the latest run in the failure rate
local REMEMBERED = 100 -- jobs that failed

local function breaker_of(stats)
  local fields = load_hash(stats)
  return { until_ms = tonumber(fields.open_until or "0"), probe = fields.probe or "", why = fields.why or "" }
end

-- "closed"; "open" until a time; "half_open": a job may probe; "probing": one does.
local function breaker_state(breaker, now)
  if breaker.until_ms == 0 then return "closed" end
  if now < breaker.until_ms then return "open" end
  if breaker.probe ~= "" and redis.call("EXISTS", lease_key(breaker.probe)) == 1 then return "probing" end
  return "half_open"
end

local function breaker_allows(stats, now)
  if not load_hash(stats).open_until then return true end
  local state = breaker_state(breaker_of(stats), now)
  return state == "closed" or state == "half_open"
end

-- A job was offered: if the breaker is open, it is the probe.
local function set_probe(stats, job)
  if load_hash(stats).open_until then set_field(stats, "probe", job) end
end

local function penalty(stats, now)
  local fields = load_hash(stats)
  if not fields.penalty then return 0 end
  local half_life_ms = 60000
  return tonumber(fields.penalty) * 0.5 ^ ((now - tonumber(fields.penalty_at)) / half_life_ms)
end

-- The latest REMEMBERED jobs whose last run there failed, by time; the field `failing` has their number.
local function failed_key(stats) return STATS .. ":failed" .. string.sub(stats, #STATS + 1) end

local function has_failed(stats, job)
  return load_hash(stats).failing and redis.call("ZSCORE", failed_key(stats), job) ~= false
end

local function count_failing(stats)
  local count = redis.call("ZCARD", failed_key(stats))
  set_field(stats, "failing", count > 0 and count)
end

-- Return whether a job would be the probe although its last run there failed: the job, and not the server, may be at
-- fault.
local function is_repeated_probe(stats, job, now)
  return load_hash(stats).open_until and breaker_state(breaker_of(stats), now) == "half_open" and has_failed(stats, job)
end

-- Open a breaker, longer each time that another job proves the fault.  `why`: runs failed one after another
-- ("failures"), too many of them did ("rate"), or the probe did ("probe").
local function open_breaker(stats, now, settings, is_proof, why)
  local times = increment_field(stats, "opened", is_proof and 1 or 0)
  local cooldown_ms = math.min(settings.breaker_open_ms * 2 ^ math.min(times - 1, 30), settings.breaker_open_max_ms)
  set_field(stats, "open_until", now + cooldown_ms)
  set_field(stats, "why", why)
  set_field(stats, "probe", false)
  set_field(stats, "streak", false)
end

-- Record a failure.  `is_proof`: the job's first in a row; a job that fails again and again counts once.  `in_a_row`:
-- so many failures open a model's breaker, and nothing else does, since other servers may be well.
local function record_failure(stats, job, now, settings, is_proof, in_a_row)
  local fields = load_hash(stats)
  if is_proof then
    set_field(stats, "penalty", string.format("%.6f", penalty(stats, now) + 1))
    set_field(stats, "penalty_at", now)
  end
  if fields.open_until then
    if fields.probe == job then open_breaker(stats, now, settings, is_proof, "probe") end
  elseif is_proof then
    local streak = increment_field(stats, "streak", 1)
    local means_something = tonumber(fields.runs or 0) >= 20
    local often = means_something and tonumber(fields.rate or 0) >= settings.breaker_rate
    local why = streak >= (in_a_row or settings.breaker_failures) and "failures"
      or (often and streak > 1 and not in_a_row and "rate")
    if why then open_breaker(stats, now, settings, true, why) end
  end
end

-- Record what a run says: "failed"; "", nothing of the server; or that it is well.  `in_a_row`: as above.
local function record_signal(stats, job, signal, now, settings, in_a_row)
  local fields = load_hash(stats)
  if signal == "" then
    if fields.probe == job then set_field(stats, "probe", false) end
    return
  end
  local failed, failed_before = signal == "failed", has_failed(stats, job)
  if not (failed and failed_before) then
    local rate = tonumber(fields.rate or 0)
    set_field(stats, "rate", string.format("%.6f", rate + SMOOTHING * ((failed and 1 or 0) - rate)))
    increment_field(stats, "runs", 1)
  end
  if failed then
    record_failure(stats, job, now, settings, not failed_before, in_a_row)
    redis.call("ZADD", failed_key(stats), now, job)
    redis.call("ZREMRANGEBYRANK", failed_key(stats), 0, -1 - REMEMBERED)
    count_failing(stats)
    return
  end
  if failed_before then
    redis.call("ZREM", failed_key(stats), job)
    count_failing(stats)
  end
  set_field(stats, "streak", false)
  if fields.probe ~= job then return end
  for _, name in ipairs({ "open_until", "why", "opened", "probe", "rate", "runs" }) do set_field(stats, name, false) end
end

-- Return the parts of a server's score for a model, and their total: the lowest is best.  The weight of the server
-- divides all parts but the silence.
local function server_score(server, entry, model, now)
  local stats = stats_key("server", server)
  local fields, mean = load_hash(stats), get_number(stats_key("model", model), "run_ms")
  local own = fields["run_ms:" .. model]
  local parts = {
    load = math.max(tonumber(fields.taken or "0"), 0) / slots_in(entry),
    failures = penalty(stats, now),
    slowness = own and mean > 0 and math.min(math.max(tonumber(own) / mean - 1, -0.5), 2) or 0,
    swap = fields.loaded and fields.loaded ~= model and 1 or 0,
    silence = fields.silent_since and 10000 or 0, -- it comes after all that answer their health checks in time
  }
  local weight = tonumber(string.match(entry, "^%a+ %d+ (%S+)") or "1")
  parts.total = (1 + parts.load + parts.failures + parts.slowness + parts.swap) / weight + parts.silence
  return parts
end
