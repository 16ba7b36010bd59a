--[[ connect_node: give a node that has connected to a gateway the number of its connection.
  Key: a hash: "gateway <g>" -> "<until> <address>"; "node <n>" -> "<number> <since> <state> <instance> <gateway>
       <reason>", see routing/queue/presence.py
  Takes
    node: text
    instance: text      random, of this process of the agent
    gateway: text
    state: text         connected, paused
    reason: text        why it is paused
    replaces: flag      the connection of another instance was found dead
  Returns
    number: int         grows with each connection of the node, also if Redis was emptied; 0: another instance is
                        connected
    former: text        the gateway of the connection before, or of the other instance; "": there is none
  Called by routing/queue/presence.py: Presence.connect
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local key, now = KEYS[1], now_ms()
local before = redis.call("HGET", key, "node " .. node) or ""
local number, known, of, former = string.match(before, "^(%d+) %d+ (%a+) (%S+) (%S+) ")
number = tonumber(number or "0")
if known == "absent" then former = nil end
if former and of ~= instance and not replaces then
  local until_ms = string.match(redis.call("HGET", key, "gateway " .. former) or "", "^(%d+) ")
  if until_ms and tonumber(until_ms) > now then return { 0, former } end
end
number = math.max(number + 1, now)
redis.call("HSET", key, "node " .. node,
  string.format("%.0f %.0f %s %s %s %s", number, now, state, instance, gateway, reason))
return { number, former or "" }
