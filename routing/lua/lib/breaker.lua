-- breaker: a server, or a model, whose runs go wrong one after another is left alone for a while, and then tried
-- with exactly one job.  Its state is shared by all processes, since it stands beside the offers.

local HALF_LIFE_MS = 60000 -- of a failure's weight in the penalty
local SMOOTHING = 0.1 -- share of the latest run in the failure rate
local RATE_RUNS = 20 -- runs before a rate means anything
local REMEMBERED = 100 -- jobs that failed

local function breaker_of(stats)
  local has = read_hash(stats)
  return { until_ms = tonumber(has.open_until or "0"), probe = has.probe or "", why = has.why or "" }
end

-- "closed"; "open" until a moment; "half_open": one probe may go, "probing": it is under way.
local function breaker_state(breaker, now)
  if breaker.until_ms == 0 then return "closed" end
  if now < breaker.until_ms then return "open" end
  if breaker.probe ~= "" and redis.call("EXISTS", lease_key(breaker.probe)) == 1 then return "probing" end
  return "half_open"
end

local function lets_through(stats, now)
  if not read_hash(stats).open_until then return true end
  local state = breaker_state(breaker_of(stats), now)
  return state == "closed" or state == "half_open"
end

-- A job was offered: with an open breaker it is the probe.
local function note_probe(stats, job)
  if read_hash(stats).open_until then set_field(stats, "probe", job) end
end

local function penalty(stats, now)
  local has = read_hash(stats)
  if not has.penalty then return 0 end
  return tonumber(has.penalty) * 0.5 ^ ((now - tonumber(has.penalty_at)) / HALF_LIFE_MS)
end

-- The jobs that failed when they last ran there, the latest REMEMBERED of them, by when; the field `failing` says how
-- many.
local function failed_key(stats) return STATS .. ":failed" .. string.sub(stats, #STATS + 1) end

local function has_failed(stats, job)
  return read_hash(stats).failing and redis.call("ZSCORE", failed_key(stats), job) ~= false
end

local function count_failing(stats)
  local count = redis.call("ZCARD", failed_key(stats))
  set_field(stats, "failing", count > 0 and count)
end

-- Whether a job would be the probe although it failed there when it last ran: it, and not the server, may be to blame.
local function would_probe_again(stats, job, now)
  return read_hash(stats).open_until and breaker_state(breaker_of(stats), now) == "half_open" and has_failed(stats, job)
end

-- Leave it alone for a while, longer each time that a job proves anew that it does not work.  `why`: its runs failed
-- one after another ("failures"), too many of them did ("rate"), or the one that was to try it did ("probe").
local function open_breaker(stats, now, settings, is_proof, why)
  local times = add_to_field(stats, "opened", is_proof and 1 or 0)
  local cooldown_ms = math.min(settings.breaker_open_ms * 2 ^ math.min(times - 1, 30), settings.breaker_open_max_ms)
  set_field(stats, "open_until", now + cooldown_ms)
  set_field(stats, "why", why)
  set_field(stats, "probe", false)
  set_field(stats, "streak", false)
end

-- One more failure.  `is_proof`: the job's first in a row.  One that fails again and again counts once.  `in_a_row`: so
-- many open a model's breaker, and nothing else does, for other servers may be well.
local function note_failure(stats, job, now, settings, is_proof, in_a_row)
  local has = read_hash(stats)
  if is_proof then
    set_field(stats, "penalty", string.format("%.6f", penalty(stats, now) + 1))
    set_field(stats, "penalty_at", now)
  end
  if has.open_until then
    if has.probe == job then open_breaker(stats, now, settings, is_proof, "probe") end
  elseif is_proof then
    local streak = add_to_field(stats, "streak", 1)
    local often = tonumber(has.runs or 0) >= RATE_RUNS and tonumber(has.rate or 0) >= settings.breaker_rate
    local why = streak >= (in_a_row or settings.breaker_failures) and "failures"
      or (often and streak > 1 and not in_a_row and "rate")
    if why then open_breaker(stats, now, settings, true, why) end
  end
end

-- What became of a run: "failed", "" for what says nothing of the server, or that it is well.  `in_a_row`: as above.
local function note_outcome(stats, job, outcome, now, settings, in_a_row)
  local has = read_hash(stats)
  if outcome == "" then
    if has.probe == job then set_field(stats, "probe", false) end
    return
  end
  local failed, failed_before = outcome == "failed", has_failed(stats, job)
  if not (failed and failed_before) then
    local rate = tonumber(has.rate or 0)
    set_field(stats, "rate", string.format("%.6f", rate + SMOOTHING * ((failed and 1 or 0) - rate)))
    add_to_field(stats, "runs", 1)
  end
  if failed then
    note_failure(stats, job, now, settings, not failed_before, in_a_row)
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
  if has.probe ~= job then return end
  for _, name in ipairs({ "open_until", "why", "opened", "probe", "rate", "runs" }) do set_field(stats, name, false) end
end
