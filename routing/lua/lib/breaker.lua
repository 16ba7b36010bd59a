-- breaker: a server, or a model, whose runs go wrong one after another is left alone for a while, and then tried
-- with exactly one job.  Its state is shared by all processes, since it stands beside the offers.

local HALF_LIFE_MS = 60000 -- of a failure's weight in the penalty
local SMOOTHING = 0.1 -- share of the latest run in the failure rate
local RATE_RUNS = 20 -- runs before a rate means anything

local function breaker_of(stats)
  local found = redis.call("HMGET", stats, "open_until", "probe")
  return { until_ms = tonumber(found[1] or "0"), probe = found[2] or "" }
end

-- "closed"; "open" until a moment; "half_open": one probe may go, "probing": it is under way.
local function breaker_state(breaker, now)
  if breaker.until_ms == 0 then return "closed" end
  if now < breaker.until_ms then return "open" end
  if breaker.probe ~= "" and redis.call("EXISTS", lease_key(breaker.probe)) == 1 then return "probing" end
  return "half_open"
end

local function lets_through(stats, now)
  local state = breaker_state(breaker_of(stats), now)
  return state == "closed" or state == "half_open"
end

-- A job was offered: with an open breaker it is the probe.
local function note_probe(stats, job)
  if redis.call("HEXISTS", stats, "open_until") == 1 then redis.call("HSET", stats, "probe", job) end
end

local function penalty(stats, now)
  local found = redis.call("HMGET", stats, "penalty", "penalty_at")
  if not found[1] then return 0 end
  return tonumber(found[1]) * 0.5 ^ ((now - tonumber(found[2])) / HALF_LIFE_MS)
end

local function open_breaker(stats, now, settings)
  local times = redis.call("HINCRBY", stats, "opened", 1)
  local rest_ms = math.min(settings.open_ms * 2 ^ math.min(times - 1, 30), settings.open_max_ms)
  redis.call("HSET", stats, "open_until", exact(now + rest_ms))
  redis.call("HDEL", stats, "probe", "streak", "streak_job")
end

-- One more failure.  A job that fails again and again counts once: it, and not the server, may be to blame.
local function note_failure(stats, job, now, settings)
  redis.call("HSET", stats, "penalty", string.format("%.6f", penalty(stats, now) + 1), "penalty_at", exact(now))
  local found = redis.call("HMGET", stats, "open_until", "probe", "streak_job", "rate", "runs")
  if found[1] then
    if found[2] == job then open_breaker(stats, now, settings) end
    return
  end
  local streak = tonumber(redis.call("HGET", stats, "streak") or "0")
  if found[3] ~= job then streak = redis.call("HINCRBY", stats, "streak", 1) end
  redis.call("HSET", stats, "streak_job", job)
  local often = tonumber(found[5] or "0") >= RATE_RUNS and tonumber(found[4] or "0") >= settings.rate
  if streak >= settings.failures or (often and streak > 1) then open_breaker(stats, now, settings) end
end

-- What became of a run: "ok", "failed", or "" for what says nothing of the server.
local function note_outcome(stats, job, outcome, now, settings)
  if outcome == "" then
    if redis.call("HGET", stats, "probe") == job then redis.call("HDEL", stats, "probe") end
    return
  end
  local failed = outcome == "failed" and 1 or 0
  local rate = tonumber(redis.call("HGET", stats, "rate") or "0")
  redis.call("HSET", stats, "rate", string.format("%.6f", rate + SMOOTHING * (failed - rate)))
  redis.call("HINCRBY", stats, "runs", 1)
  if failed == 1 then
    note_failure(stats, job, now, settings)
  else
    local probed = redis.call("HGET", stats, "probe") == job
    redis.call("HDEL", stats, "streak", "streak_job")
    if probed then redis.call("HDEL", stats, "open_until", "opened", "probe", "rate", "runs") end
  end
end
