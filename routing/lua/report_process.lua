--[[ report_process: report that a process lives and its facts, and return which processes live.
  Key: a hash, process -> "<reported> <until> <facts>": when it reported, and until when that is kept, ms
  Takes
    process: text     "": reports nothing, only asks
    facts: text       "": it ends
    ttl_ms: int
    most: int         processes that are kept; if there are more, a new one is not
  Returns
    processes: [{process: text, age_ms: int, facts: text}]      whose reports are kept; one that was made later than
                      now is not, for Redis' clock was set back
  Called by routing/queries/process_list.py: ProcessList._run
  Clock Redis TIME    Cost O(processes) ]]
-- @include lib/now_ms

local key, now, found = KEYS[1], now_ms(), {}
local all = redis.call("HGETALL", key)
local count = #all / 2
for i = 1, #all, 2 do
  local reported_ms, until_ms, known = string.match(all[i + 1], "^(%d+) (%d+) (.*)$")
  if all[i] == process or not known or tonumber(until_ms) < now or tonumber(reported_ms) > now then
    redis.call("HDEL", key, all[i])
    count = count - 1
  else
    found[#found + 1] = { all[i], now - tonumber(reported_ms), known }
  end
end
if process ~= "" and facts ~= "" and count < most then
  redis.call("HSET", key, process, string.format("%.0f %.0f %s", now, now + ttl_ms, facts))
  found[#found + 1] = { process, 0, facts }
end
return found
