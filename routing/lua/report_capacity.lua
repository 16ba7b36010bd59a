--[[ report_capacity: report how many more runs a worker accepts, and return how many all workers accept.
  Key: a hash, worker -> "<capacity> <until>", until when this counts, ms; of a worker that stops: "stopping <until>"
  Takes
    worker: text      "": reports nothing, only asks
    capacity: int     runs; -1: it leaves; -2: it was told to stop
    ttl_ms: int
  Returns
    total: int | None     of all reports that still count; None: no worker has one.  The others are deleted, and those
                          that would count for longer than a report may, because Redis' clock was set back
  Called by routing/queue/worker_capacity.py: WorkerCapacity._command
  Clock Redis TIME    Cost O(workers) ]]
-- @include lib/now_ms

local now, total = now_ms(), nil
if worker ~= "" and capacity == -1 then redis.call("HDEL", KEYS[1], worker) end
if worker ~= "" and capacity ~= -1 then
  local report = capacity < 0 and "stopping" or string.format("%.0f", capacity)
  redis.call("HSET", KEYS[1], worker, report .. string.format(" %.0f", now + ttl_ms))
end
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  local report, until_ms = string.match(all[i + 1], "^(%w+) (%d+)$")
  local accepts, left_ms = tonumber(report), tonumber(until_ms) - now
  if left_ms < 0 or accepts and left_ms > ttl_ms then
    redis.call("HDEL", KEYS[1], all[i])
  else
    if accepts then total = (total or 0) + accepts end
  end
end
return total or false
