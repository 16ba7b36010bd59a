--[[ relay: add events to the stream of all that happens, if it ends where the caller believes it to.
  Key: a stream; the number of an event, and 0, are its entry's id
  Takes
    last: int       the number of the event that it ends with; 0: it has had none
    cap: int        it keeps so many, or a few more
    events: [{number: int, body: text}]       in the order of their numbers
  Returns
    last: int       what it ends with now; nothing was added if that is not the last of them
  Refused when Redis is full
  Clock none    Cost O(events) ]]

local function ends_with()
  if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
  local facts = redis.call("XINFO", "STREAM", KEYS[1])
  for i = 1, #facts, 2 do
    if facts[i] == "last-generated-id" then return tonumber(string.match(facts[i + 1], "^%d+")) end
  end
end

local now = ends_with()
if now ~= last then return now end
for _, it in ipairs(events) do
  redis.call("XADD", KEYS[1], "MAXLEN", "~", cap, string.format("%.0f-0", it.number), "event", it.body)
  now = it.number
end
return now
