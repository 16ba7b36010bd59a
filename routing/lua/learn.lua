--[[ learn: jobs start; from the estimates of those that are remembered, learn how they turned out.
  Key: a hash, job:<job> "size predicted low high at level"; ratios:<size> of 8 digits each, oldest first; at:<size>
        of the last of them, ms; balance:<side>, balance:<side>:<size>; level
  Takes
    kept: int         ratios for each size
    most: int         furthest that a balance goes
    parts: int        a ratio is kept if the last one is older than this part of the job's wait
    heaviest: int     one of a sample of one in 2^n jobs counts for 2^n, up to this n
    starts: [{job_id: text, at_ms: int}]
  Returns
    learned: [flag]   of each, whether it was remembered
    level: int
  Writes only if one was remembered
  Cost O(starts)    The same as routing/queries/interval.py: learn ]]

local level = tonumber(redis.call("HGET", KEYS[1], "level") or "0")

local function learn(promise, started_ms)
  local size, predicted, low, high, at, level_then = string.match(promise, "^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$")
  local waited = math.max(1, started_ms - tonumber(at))
  local weight = 2 ^ math.min(math.max(level, tonumber(level_then)), heaviest)

  local function count(balance, missed)
    for _, name in ipairs({ balance, balance .. ":" .. size }) do
      local changed = tonumber(redis.call("HGET", KEYS[1], name) or "0") + weight * (missed and 19 or -1)
      redis.call("HSET", KEYS[1], name, math.min(math.max(changed, -most), most))
    end
  end

  count("balance:low", waited < tonumber(low))
  count("balance:high", waited > tonumber(high))
  local last = tonumber(redis.call("HGET", KEYS[1], "at:" .. size) or "0")
  if (started_ms - last) * parts >= waited then
    local ratio = math.floor(math.log(waited / tonumber(predicted)) * 10000 + 0.5)
    local ratios = (redis.call("HGET", KEYS[1], "ratios:" .. size) or "") .. string.format("%+08d", ratio)
    redis.call("HSET", KEYS[1], "ratios:" .. size, string.sub(ratios, -8 * kept), "at:" .. size, started_ms)
  end
end

local learned = {}
for n, start in ipairs(starts) do
  local promise = redis.call("HGET", KEYS[1], "job:" .. start.job_id)
  learned[n] = promise and 1 or 0
  if promise then
    redis.call("HDEL", KEYS[1], "job:" .. start.job_id)
    learn(promise, start.at_ms)
  end
end
return { learned, level }
