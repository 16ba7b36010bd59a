--[[ set_presence: let jobs be offered to nodes that are connected, and to no others.
  Keys: free, cooling, slots, servers, meta
  Takes
    gateway: text     all nodes of this gateway are in `nodes`, so that it is noted as known; "": they are not
    nodes: [{server: text, number: int, present: flag}]      number of the connection
  Returns
    changed: int      nodes whose presence is another than before; one that has a newer connection does not change
  Called by routing/queue/presence.py: Presence.set_present
  Clock Redis TIME    Cost O(slots of the nodes) ]]
-- @include lib/now_ms
-- @include lib/slots

local now, changed = now_ms(), 0
for _, node in ipairs(nodes) do
  local server, before = node.server, get_number(present_key(), node.server)
  local is_newer = before > node.number
  if node.present and before < node.number or not node.present and before == node.number then
    changed = changed + 1
    set_field(present_key(), server, node.present and integer_text(node.number) or false)
  end
  local entry = get_field(SERVERS, server)
  for n = 0, not is_newer and entry and slots_in(entry) - 1 or -1 do
    local slot = slot_name(server, n)
    if not is_online_slot(slot) then
      remove_free_slot(slot)
      redis.call("ZREM", COOLING, slot)
    elseif not redis.call("ZSCORE", FREE, slot) and not redis.call("ZSCORE", COOLING, slot) then
      make_slot_available(slot, now, 0)
    end
  end
end
if gateway ~= "" then set_field(present_key(), "#" .. gateway, "1") end
flush_hashes()
return changed
