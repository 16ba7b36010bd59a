--[[ begin: make a room that is closed ready to be filled: what Redis kept of another copy, of another record, or of a
  moment that has been undone, is forgotten.  Means and breakers are kept, unless the record is another.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    record: text      the identity of the record that it will be filled from
  Returns
    answer: "open" | "ready" | "cleared"      it is open, and left as it is; nothing had to be forgotten; something had
  Once it is ready, others who begin too forget nothing of what has been filled meanwhile
  Cost O(lanes + leases)    Upholds LEASE-1, ORDER-1 ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch

local function forget(names, key_of)
  for _, name in ipairs(names) do redis.call("UNLINK", key_of(name)) end
end

local function forget_waiting()
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do
    forget(redis.call("ZRANGE", class_key(class), 0, -1), lane_key)
    redis.call("UNLINK", class_key(class))
  end
  forget(redis.call("HKEYS", GROUPS), group_key)
  forget(redis.call("HKEYS", LANES), marks_key)
end

local function forget_stats(all)
  for _, server in ipairs(redis.call("HKEYS", SERVERS)) do
    local stats = stats_key("server", server)
    redis.call("HDEL", stats, "taken")
    if all then redis.call("UNLINK", stats, STATS .. ":failed:server:" .. server) end
  end
  for _, rule in ipairs(redis.call("HKEYS", RULES)) do
    local model = string.match(rule, "^model (.*)$")
    if model then redis.call("UNLINK", tags_key(model)) end
    if model and all then redis.call("UNLINK", stats_key("model", model), STATS .. ":failed:model:" .. model) end
  end
end

if is_open() then return "open" end

local known, copy = redis.call("HMGET", META, "copy", "lost"), copy_id()
local answer = "ready"
if (known[1] and known[1] ~= copy) or known[2] or is_foreign(record) then
  forget_waiting()
  forget(redis.call("ZRANGE", LEASES, 0, -1), lease_key)
  forget(redis.call("HKEYS", SLOTS), beside_key)
  forget_stats(is_foreign(record))
  redis.call("UNLINK", CLASSES, GROUPS, KINDS, LANES, RULES, FREE, COOLING, SLOTS, LEASES, SERVERS, HELD, META,
    excess_key(), open_key(), unsorted_key(), ungrouped_key())
  answer = "cleared"
end
redis.call("HSET", META, "copy", copy, "record", record)
return answer
