--[[ note_node: note the state of a node's connection, unless the node has another one.
  Key: as of connect_node
  Takes
    node: text
    number: int       of the connection
    instance: text
    gateway: text
    state: text       connected, paused, absent
    reason: text
  Returns
    noted: flag       also if this Redis did not know the node, for it was emptied
  Called by routing/queue/presence.py: Presence.note
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local key, now = KEYS[1], now_ms()
local before = redis.call("HGET", key, "node " .. node)
if before and tonumber(string.match(before, "^%d+")) ~= number then return 0 end
local since, known = string.match(before or "", "^%d+ (%d+) (%a+)")
redis.call("HSET", key, "node " .. node,
  string.format("%.0f %.0f %s %s %s %s", number, known == state and since or now, state, instance, gateway, reason))
return 1
