-- now_ms: the clock of the Redis server, in milliseconds.  Tests swap this fragment for one that reads a key.
local function now_ms()
  local time = redis.call("TIME")
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
