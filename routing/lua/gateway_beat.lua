--[[ gateway_beat: report that a gateway lives.
  Key: as of connect_node
  Takes
    gateway: text
    address: text     where workers reach it; "": it ends
    ttl_ms: int       for so long it counts as alive
  Returns
    known: flag       it was known before; False: this Redis was emptied, or it is the first report
  Called by routing/queue/presence.py: Presence.beat
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms

local key, field = KEYS[1], "gateway " .. gateway
if address == "" then return redis.call("HDEL", key, field) end
return redis.call("HSET", key, field, string.format("%.0f %s", now_ms() + ttl_ms, address)) == 0 and 1 or 0
