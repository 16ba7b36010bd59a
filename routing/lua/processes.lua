--[[ processes: say that a process lives and how it stands, and hear who else lives.
  Key: a hash, process -> "<said> <until> <facts>": when it said so, and until when that is kept, ms
  Takes
    process: text     "": says nothing, only asks
    facts: text       "": it leaves
    ttl_ms: int
    most: int         processes that are kept; of more, a new one is not
  Returns
    processes: [{process: text, age_ms: int, facts: text}]      of all that said so within their time
  Clock Redis TIME    Cost O(processes) ]]
-- @include lib/now_ms

local key, now, found = KEYS[1], now_ms(), {}
local all = redis.call("HGETALL", key)
local count = #all / 2
for i = 1, #all, 2 do
  local said, till, told = string.match(all[i + 1], "^(%d+) (%d+) (.*)$")
  if all[i] == process or not told or tonumber(till) < now then
    redis.call("HDEL", key, all[i])
    count = count - 1
  else
    found[#found + 1] = { all[i], math.max(now - tonumber(said), 0), told }
  end
end
if process ~= "" and facts ~= "" and count < most then
  redis.call("HSET", key, process, string.format("%.0f %.0f %s", now, now + ttl_ms, facts))
  found[#found + 1] = { process, 0, facts }
end
return found
