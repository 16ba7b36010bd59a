--[[ relay: add events to the event stream, if it ends with the event that the caller expects.
  Key: a stream; the number of an event, and 0, are its entry's id
  Takes
    last: int       number of the event that it ends with; 0: it is empty
    cap: int        events that are kept, or a few more
    events: [{number: int, body: text}]       in the order of their numbers
  Returns
    last: int       what it ends with now; if that is not the last of the events, none was added
  Refused when Redis is full
  Called by tasks/relay/sinks/redis_stream.py: EventStream.add
  Clock none    Cost O(events) ]]

local function last_number()
  if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
  local facts = redis.call("XINFO", "STREAM", KEYS[1])
  for i = 1, #facts, 2 do
    if facts[i] == "last-generated-id" then return tonumber(string.match(facts[i + 1], "^%d+")) end
  end
end

local number = last_number()
if number ~= last then return number end
for _, event in ipairs(events) do
  redis.call("XADD", KEYS[1], "MAXLEN", "~", cap, string.format("%.0f-0", event.number), "event", event.body)
  number = event.number
end
return number
