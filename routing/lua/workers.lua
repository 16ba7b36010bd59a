--[[ workers: say for how many more runs a worker has room, and hear how many all of them have room for.
  Key: a hash, worker -> "<room> <until>": until when that is believed, ms; of a worker that stops "stopping <until>"
  Takes
    worker: text      "": says nothing, only asks
    room: int         runs; -1: it leaves; -2: it was told to stop
    ttl_ms: int
  Returns
    room: int         of all that said so within their time; the others are forgotten
  Clock Redis TIME    Cost O(workers) ]]
-- @include lib/now_ms

local now, everyones = now_ms(), 0
if worker ~= "" and room == -1 then redis.call("HDEL", KEYS[1], worker) end
if worker ~= "" and room ~= -1 then
  local said = room < 0 and "stopping" or string.format("%.0f", room)
  redis.call("HSET", KEYS[1], worker, said .. string.format(" %.0f", now + ttl_ms))
end
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  local has, till = string.match(all[i + 1], "^(%w+) (%d+)$")
  if tonumber(till) < now then
    redis.call("HDEL", KEYS[1], all[i])
  else
    everyones = everyones + (tonumber(has) or 0)
  end
end
return everyones
