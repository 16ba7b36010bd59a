--[[ learn: a job starts; if the estimate it was given is remembered, learn from how that turned out.
  KEYS[1] forecast  hash  job:<job> "size predicted low high at level"; ratios:<size> of 8 digits each, oldest first;
                    at:<size> of the last of them, ms; balance:<side>, balance:<side>:<size>; level
  ARGV[1] job   ARGV[2] now_ms   ARGV[3] kept: ratios for each size   ARGV[4] most: furthest that a balance goes
  ARGV[5] parts: a ratio is kept if the last one is older than this part of the job's wait
  ARGV[6] heaviest: one of a sample of one in 2^n jobs counts for 2^n, up to this n
  Returns {learned 0|1, level}      Writes nothing on 0
  Cost O(1)   The same as insight/interval.py: learn ]]

local promise = redis.call("HGET", KEYS[1], "job:" .. ARGV[1])
local level = tonumber(redis.call("HGET", KEYS[1], "level") or "0")
if not promise then return { 0, level } end

local size, predicted, low, high, at, level_then = string.match(promise, "^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$")
local now, most = tonumber(ARGV[2]), tonumber(ARGV[4])
local waited = math.max(1, now - tonumber(at))
local weight = 2 ^ math.min(math.max(level, tonumber(level_then)), tonumber(ARGV[6]))

local function count(balance, missed)
  for _, name in ipairs({ balance, balance .. ":" .. size }) do
    local changed = tonumber(redis.call("HGET", KEYS[1], name) or "0") + weight * (missed and 19 or -1)
    redis.call("HSET", KEYS[1], name, math.min(math.max(changed, -most), most))
  end
end

redis.call("HDEL", KEYS[1], "job:" .. ARGV[1])
count("balance:low", waited < tonumber(low))
count("balance:high", waited > tonumber(high))
local last = tonumber(redis.call("HGET", KEYS[1], "at:" .. size) or "0")
if (now - last) * tonumber(ARGV[5]) >= waited then
  local ratio = math.floor(math.log(waited / tonumber(predicted)) * 10000 + 0.5)
  local ratios = (redis.call("HGET", KEYS[1], "ratios:" .. size) or "") .. string.format("%+08d", ratio)
  redis.call("HSET", KEYS[1], "ratios:" .. size, string.sub(ratios, -8 * tonumber(ARGV[3])), "at:" .. size, ARGV[2])
end
return { 1, level }
