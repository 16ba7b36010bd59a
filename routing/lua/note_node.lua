--[[ note_node: change the state of a node's connection, if it is still its newest one.
  Key: as of connect_node
  Takes
    node: text
    number: int       of the connection
    state: text       connected, paused, absent
    reason: text
  Returns
    changed: flag     False: the node has a newer connection
  Called by routing/queue/presence.py: Presence.note
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local key, now = KEYS[1], now_ms()
local before = redis.call("HGET", key, "node " .. node) or ""
local known, instance, gateway = string.match(before, "^(%d+) %d+ %a+ (%S+) (%S+) ")
if tonumber(known or "-1") ~= number then return 0 end
redis.call("HSET", key, "node " .. node,
  string.format("%.0f %.0f %s %s %s %s", number, now, state, instance, gateway, reason))
return 1
