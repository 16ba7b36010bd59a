--[[ workers: say for how many more runs a worker has room, and hear how many all of them have room for.
  KEYS[1] workers   hash  worker -> "<room> <until>": until when that is believed, ms
  ARGV[1] worker    "": says nothing, only asks   ARGV[2] room   runs, 0 or more; "": it leaves   ARGV[3] ttl_ms
  Returns {room of all, workers}, of those that said so within their time; the others are forgotten
  Clock Redis TIME    Cost O(workers) ]]
-- @include lib/now_ms

local now, room, living = now_ms(), 0, 0
if ARGV[1] ~= "" and ARGV[2] == "" then redis.call("HDEL", KEYS[1], ARGV[1]) end
if ARGV[1] ~= "" and ARGV[2] ~= "" then
  redis.call("HSET", KEYS[1], ARGV[1], ARGV[2] .. " " .. string.format("%.0f", now + tonumber(ARGV[3])))
end
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  local has, till = string.match(all[i + 1], "^(%d+) (%d+)$")
  if tonumber(till) < now then
    redis.call("HDEL", KEYS[1], all[i])
  else
    room, living = room + tonumber(has), living + 1
  end
end
return { room, living }
