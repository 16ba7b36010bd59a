--[[ begin_rebuild: make a closed queue ready to be filled.  If Redis may lack leases, as it has another copy of the
  data, another database's, or has lost its last moments, everything is deleted but means and breakers (these, too, if
  the database is another).  If it was closed on purpose, only what waits is deleted: no lease was lost.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    database_id: text      of the database that it will be filled from
    filling: text          a name for a new filling of the queue
  Returns
    answer: "open" | "ready" | "emptied" | "cleared"      open: it is left as it is; ready: nothing had to be deleted
    filling: text          the name of the present filling: the given one, unless the leases are of an earlier one
    epoch: int             the last epoch of this queue as Redis knows it; 0: it knows none
  Several processes may begin; once it is ready, none deletes what another has filled meanwhile
  Called by routing/queue/fleets.py: Fleets.begin_rebuild
  Cost O(lanes + leases)    Upholds LEASE-1, ORDER-1 ]]
-- @include lib/epoch
-- @include lib/slots

local function delete_members(names, key_of)
  for _, name in ipairs(names) do redis.call("UNLINK", key_of(name)) end
end

local function delete_waiting()
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do
    delete_members(redis.call("ZRANGE", class_key(class), 0, -1), lane_key)
    redis.call("UNLINK", class_key(class))
  end
  local groups = redis.call("HKEYS", GROUPS)
  delete_members(groups, group_key)
  delete_members(groups, function(group) return model_groups_key(model_of(group)) end)
  delete_members(redis.call("HKEYS", LANES), account_lanes_key)
  redis.call("UNLINK", CLASSES, GROUPS, LANES, accounts_to_reindex_key(), classes_to_regroup_key())
  for _, field in ipairs(redis.call("HKEYS", META)) do
    if string.sub(field, 1, 8) == "waiting:" then redis.call("HDEL", META, field) end
  end
end

local function delete_stats(all)
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

local function delete_kinds()
  local kinds = redis.call("HGETALL", KINDS)
  for i = 1, #kinds, 2 do
    redis.call("UNLINK", free_key(kinds[i]))
    for model in models_in(kinds[i + 1]) do redis.call("UNLINK", model_kinds_key(model)) end
  end
  redis.call("UNLINK", ready_key())
end

if is_open() then return { "open", "", 0 } end

local found, id = redis.call("HMGET", META, "copy", "lost", "filling", "number"), replication_id()
local answer, name, last = "ready", found[3], tonumber(found[4] or "0")
if (found[1] and found[1] ~= id) or found[2] == LOST or is_other_database(database_id) then
  delete_waiting()
  delete_members(redis.call("ZRANGE", LEASES, 0, -1), lease_key)
  delete_members(redis.call("HKEYS", SLOTS), displaced_key)
  delete_stats(is_other_database(database_id))
  delete_kinds()
  redis.call("UNLINK", KINDS, RULES, FREE, COOLING, SLOTS, LEASES, SERVERS, HELD, META, excess_key(), open_offers_key())
  answer, name = "cleared", false
elseif found[2] then
  delete_waiting()
  redis.call("HDEL", META, "lost", "catalog")
  answer = "emptied"
end
name = name or filling
redis.call("HSET", META, "copy", id, "record", database_id, "filling", name)
if last > 0 then redis.call("HSET", META, "number", last) end
return { answer, name, last }
