--[[ sync_catalog: make a fleet's servers, slots and rules equal to a catalog's.
  Keys: classes, kinds, lanes, rules, free, cooling, slots, servers, tags, stats, held, meta
  Takes
    database_id: text
    version: int        of the catalog; one that is older than the fleet's changes nothing
    base: int           what is given differs from this version of the catalog; -1: all servers are given
    repairs: flag       without a base: look at the slots and leases of all servers, and not only of those whose entry
                        differs
    rules_given: flag   all rules are given; without it they are as they were in the base
    servers: [{name: text, entry: text}]      entry "": the server was removed
    rules: {text: text}      by field, see lib/rules
  Returns
    answer: "synced" | "stale" | "behind" | "foreign"
    newest: int         version that the fleet has
      behind: it is older than the base
      foreign: the queue was filled from another database; it is closed until it is filled from this one
  A slot that holds a lease keeps it until it is released
  A queue with waiting jobs of a model that was removed from the fleet, or whose policy orders lanes differently, is
  closed, and filled again from the database
  Afterwards reindex_lanes has to be called until nothing is left: lanes of changed rules need new keys, and classes
  that other kinds of servers may run need new groups
  Called by routing/queue/slots.py: Slots._whole_command, routing/queue/slots.py: Slots._changes_command
  Clock Redis TIME    Cost O(servers + rules) that are given; O(slots + accounts + classes) that change
  Upholds LEASE-1, SLOT-2 ]]
-- @include lib/epoch
-- @include lib/now_ms
-- @include lib/policies
-- @include lib/slots

local MANY_KINDS = 64 -- of servers that serve one model

local function first_word(text, otherwise) return string.match(text, "^%S+") or otherwise end

local function reweigh(account, old, new)
  local policy = policy_of(model_of(account))
  if policy.reweigh then policy.reweigh(account, tonumber(first_word(old, "1")), tonumber(first_word(new, "1"))) end
end

-- A model's policy changes: what accounts were charged does not count any more.
local function forget_charges(model, old, new)
  for _, policy in ipairs({ policy_called(first_word(old, "")), policy_called(first_word(new, "")) }) do
    if policy.forget then policy.forget(model) end
  end
end

-- Delete what runs have shown of removed servers: it does not apply to later servers of the same names.
local function forget_servers(removed)
  for server in pairs(removed) do
    redis.call("UNLINK", stats_key("server", server), STATS .. ":failed:server:" .. server)
    redis.call("HDEL", META, "failures:" .. server, "silent:" .. server)
    set_field(present_key(), server, false)
  end
end

-- Return whether jobs wait of a model that was removed from this fleet: a process with an old catalog enqueued them.
-- By now a model of another fleet may have the name.
local function has_jobs_of_removed_models(changed)
  for rule in pairs(changed) do
    local model = string.match(rule, "^model (.*)$")
    local waiting = model and tonumber(redis.call("HGET", META, "waiting:" .. model) or "0") or 0
    if waiting > 0 and redis.call("HEXISTS", RULES, rule) == 0 then return true end
  end
  return false
end

-- Return the servers that are looked at: name -> {old, new}, their entries before and now; false: there is none.
local function servers_to_place()
  local former, given, found = {}, {}, {}
  if base < 0 then
    local all = redis.call("HGETALL", SERVERS)
    for i = 1, #all, 2 do former[all[i]] = all[i + 1] end
  end
  for _, server in ipairs(servers) do
    local name, new = server.name, server.entry ~= "" and server.entry
    local old = former[name] or base >= 0 and redis.call("HGET", SERVERS, name)
    if repairs or old ~= new then found[name] = { old = old, new = new } end
    given[name] = true
  end
  for name, old in pairs(former) do
    if not given[name] then found[name] = { old = old, new = false } end
  end
  return found
end

-- Return the number of a server's slots that are looked at when its entry changes.
local function most_slots(entries)
  return math.max(entries.old and slots_in(entries.old) or 0, entries.new and slots_in(entries.new) or 0)
end

-- Return the slots with leases of these servers, perhaps also of others.  Leases on slots that a server does not have
-- are counted as its excess: without any, only the slots that it has are looked at.
local function slots_with_leases(placed)
  if base < 0 then return redis.call("HKEYS", SLOTS) end
  local found = {}
  for server, entries in pairs(placed) do
    if redis.call("HEXISTS", excess_key(), server) == 1 then return redis.call("HKEYS", SLOTS) end
    for n = 0, most_slots(entries) - 1 do
      local slot = slot_name(server, n)
      if redis.call("HEXISTS", SLOTS, slot) == 1 then found[#found + 1] = slot end
    end
  end
  return found
end

-- Count the leases of these servers, and how many of them have no slot.
local function count_leases(placed)
  local taken, excess, slots = {}, {}, slots_with_leases(placed)
  for server, entries in pairs(placed) do
    if entries.new then taken[server] = 0 end
    redis.call("HDEL", excess_key(), server)
  end
  if repairs then redis.call("DEL", excess_key()) end
  for _, slot in ipairs(slots) do
    local server = server_of(slot)
    if repairs or placed[server] then
      local displaced = redis.call("LLEN", displaced_key(slot))
      if taken[server] then taken[server] = taken[server] + 1 + displaced end
      local without = displaced + (is_removed_slot(slot) and 1 or 0)
      if without > 0 then excess[server] = (excess[server] or 0) + without end
    end
  end
  for server, count in pairs(taken) do
    local stats = stats_key("server", server)
    if tonumber(redis.call("HGET", stats, "taken") or "0") ~= count then redis.call("HSET", stats, "taken", count) end
  end
  for server, count in pairs(excess) do redis.call("HSET", excess_key(), server, count) end
  set_field(META, "excess", redis.call("EXISTS", excess_key()) == 1 and "1" or false)
end

-- Let the slots of a server be offered if it is online now, and no others; a free slot moves to the index of its kind.
local function place_slots(server, entries, now)
  local old, new = entries.old, entries.new
  local from, to = old and kind_of(old), new and kind_of(new)
  for n = 0, most_slots(entries) - 1 do
    local slot = slot_name(server, n)
    local since = redis.call("ZSCORE", FREE, slot)
    if since and from and from ~= to then redis.call("ZREM", free_key(from), slot) end
    if not is_online_slot(slot) then
      remove_free_slot(slot)
      redis.call("ZREM", COOLING, slot)
    elseif since and from ~= to then
      index_free_slot(slot, to, since)
    elseif not since and not redis.call("ZSCORE", COOLING, slot) then
      make_slot_available(slot, now, 0)
    end
  end
end

-- Remove slots that no server has from the indexes.
local function remove_stray_slots()
  for _, index in ipairs({ FREE, COOLING }) do
    for _, slot in ipairs(redis.call("ZRANGE", index, 0, -1)) do
      if not is_online_slot(slot) then redis.call("ZREM", index, slot) end
    end
  end
end

-- Delete what runs have shown of a removed model.
local function forget_model(model)
  redis.call("UNLINK", tags_key(model), stats_key("model", model), STATS .. ":failed:model:" .. model)
  for _, server in ipairs(redis.call("HKEYS", SERVERS)) do
    local stats = stats_key("server", server)
    redis.call("HDEL", stats, "run_ms:" .. model)
    if redis.call("HGET", stats, "loaded") == model then redis.call("HDEL", stats, "loaded") end
  end
end

-- Return whether the jobs of a model have other scores in their lanes under its new policy.
local function changes_scores(old, new)
  if old == "" or new == "" then return false end
  local before, after = policy_called(first_word(old, "")), policy_called(first_word(new, ""))
  return before ~= after and (before.lane_score or after.lane_score) ~= nil
end

-- A rule's text changes from `old` to `new`; "": there is none.
local function apply_change(rule, old, new)
  local kind, name = string.match(rule, "^(%a+) (.*)$")
  if kind == "account" then reweigh(name, old, new) end
  if kind == "model" and new == "" then forget_model(name) end
  if kind == "model" and first_word(old, "") ~= first_word(new, "") then forget_charges(name, old, new) end
end

-- Return whether these changes may add a kind of servers, or remove the last server of one.
local function change_kinds(placed)
  for _, entries in pairs(placed) do
    local old, new = entries.old and kind_of(entries.old), entries.new and kind_of(entries.new)
    if old ~= new and (old or redis.call("HEXISTS", KINDS, new) == 0) then return true end
  end
  return false
end

-- Store the kinds of servers.  If they have changed, each class has to be put into its group again.
local function store_kinds()
  local kinds = {}
  for _, entry in ipairs(redis.call("HVALS", SERVERS)) do kinds[kind_of(entry)] = string.match(entry, "\n.*$") end
  local before, known = redis.call("HKEYS", KINDS), 0
  for _, kind in ipairs(before) do known = known + (kinds[kind] and 1 or 0) end
  local count = 0
  for _ in pairs(kinds) do count = count + 1 end
  if known == #before and known == count then return end
  for _, kind in ipairs(before) do
    for model in models_in(redis.call("HGET", KINDS, kind)) do redis.call("UNLINK", model_kinds_key(model)) end
  end
  redis.call("DEL", KINDS)
  local largest = 0
  for kind, text in pairs(kinds) do
    redis.call("HSET", KINDS, kind, text)
    mark_ready(kind) -- While there were many kinds, waiting jobs did not.
    for model in models_in(text) do
      redis.call("SADD", model_kinds_key(model), kind)
      largest = math.max(largest, redis.call("SCARD", model_kinds_key(model)))
    end
  end
  set_field(META, "many_kinds", largest > MANY_KINDS and "1" or false)
  redis.call("DEL", classes_to_regroup_key())
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do redis.call("RPUSH", classes_to_regroup_key(), class) end
end

-- Write the index of each kind's free slots again if it lacks slots.
local function repair_index()
  local kinds, count = redis.call("HKEYS", KINDS), 0
  for _, kind in ipairs(kinds) do count = count + redis.call("ZCARD", free_key(kind)) end
  if count == redis.call("ZCARD", FREE) then return end
  for _, kind in ipairs(kinds) do redis.call("UNLINK", free_key(kind)) end
  local slots = redis.call("ZRANGE", FREE, 0, -1, "WITHSCORES")
  for i = 1, #slots, 2 do
    index_free_slot(slots[i], kind_of(get_field(SERVERS, server_of(slots[i]))), slots[i + 1])
  end
end

-- After a change of rules: list the models, and count the slots of tenants that are limited.
local function recount_tenants()
  local models, sums = {}, {}
  for _, rule in ipairs(redis.call("HKEYS", RULES)) do models[#models + 1] = string.match(rule, "^model (.*)$") end
  redis.call("HSET", META, "models", table.concat(models, "\n"))
  local held = redis.call("HGETALL", HELD)
  for i = 1, #held, 2 do
    local tenant = string.match(held[i], "^([^|]*)|")
    if not tenant then redis.call("HDEL", HELD, held[i]) end
    if tenant and slots_of_tenant(tenant) then sums[tenant] = (sums[tenant] or 0) + held[i + 1] end
  end
  for tenant, sum in pairs(sums) do redis.call("HSET", HELD, tenant, sum) end
end

local now, newest = now_ms(), tonumber(redis.call("HGET", META, "catalog") or "-1")
if is_other_database(database_id) then
  redis.call("HDEL", META, "epoch")
  return { "foreign", newest }
end
if newest > version then return { "stale", newest } end
if newest < base then return { "behind", newest } end

redis.call("HSET", META, "catalog", version)
if database_id ~= "" then redis.call("HSET", META, "record", database_id) end
local placed, removed, changed = servers_to_place(), {}, {}
local are_kinds_changed = change_kinds(placed)
for server, entries in pairs(placed) do
  if entries.new then
    redis.call("HSET", SERVERS, server, entries.new)
  else
    redis.call("HDEL", SERVERS, server)
    removed[server] = true
  end
end
if next(placed) then
  forget_servers(removed)
  count_leases(placed)
  for server, entries in pairs(placed) do place_slots(server, entries, now) end
end
if repairs then remove_stray_slots() end
if repairs or are_kinds_changed then store_kinds() end
if repairs then repair_index() end

if rules_given then
  local before = redis.call("HGETALL", RULES)
  for i = 1, #before, 2 do
    if rules[before[i]] == nil then
      redis.call("HDEL", RULES, before[i])
      changed[before[i]] = before[i + 1]
    elseif rules[before[i]] == before[i + 1] then
      rules[before[i]] = nil
    else
      changed[before[i]] = before[i + 1]
    end
  end
  for rule, text in pairs(rules) do
    redis.call("HSET", RULES, rule, text)
    changed[rule] = changed[rule] or ""
  end
end
local needs_other_scores = false
for rule, old in pairs(changed) do
  local new = rules[rule] or ""
  apply_change(rule, old, new)
  needs_other_scores = needs_other_scores or (string.match(rule, "^model ") and changes_scores(old, new))
end
if next(changed) then
  recount_tenants()
  for _, account in ipairs(redis.call("HKEYS", LANES)) do -- of all with waiting jobs
    local tenant, model = string.match(account, "^([^|]*)|(.*)$")
    if changed["model " .. model] or changed["account " .. account] or changed["tenant " .. tenant]
      or changed["slots " .. tenant] or changed["slots "] then
      redis.call("RPUSH", accounts_to_reindex_key(), account)
    end
  end
end
flush_hashes()
if has_jobs_of_removed_models(changed) or needs_other_scores then close_for_refill() end
return { "synced", version }
