--[[ sync: make the fleet's copy of the registry and of the rules equal to the record's, and slots and lanes with it.
  Keys: classes, kinds, lanes, rules, free, cooling, slots, servers, tags, stats, meta
  Takes
    record: text        its identity
    version: int        of the catalog; an older one than the copy's changes nothing
    servers: [{name: text, entry: text, slots: int}]
    rules: {text: text}      by field, see lib/rules
  Returns
    answer: "synced" | "stale" | "foreign"
    newest: int         version of the copy
      foreign: the room is another record's, and is closed until it is filled from this one
  A slot that holds a lease keeps it until it is released
  A room in which jobs wait by a name that is no model's here any more is closed, and filled anew from the record
  Lanes that a changed rule concerns get their new keys from resort, and classes that other kinds of servers may run
  now their groups: it has to be called until none is left
  Clock Redis TIME    Cost O(slots log slots); O(accounts + classes) after a change    Upholds LEASE-1, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/slots
-- @include lib/rules
-- @include lib/order
-- @include lib/policies

local function first_word(text, otherwise) return string.match(text, "^%S+") or otherwise end

local function reweigh(account, old, new)
  local policy = policy_of(model_of(account))
  if policy.reweigh then policy.reweigh(account, tonumber(first_word(old, "1")), tonumber(first_word(new, "1"))) end
end

-- A model's policy is another than before: whichever charges accounts begins anew.
local function forget_charges(model, old, new)
  for _, policy in ipairs({ policy_called(first_word(old, "")), policy_called(first_word(new, "")) }) do
    if policy.forget then policy.forget(model) end
  end
end

-- What runs have shown of servers that are gone does not concern others that are given their names.
local function forget_servers(gone)
  for server in pairs(gone) do
    redis.call("UNLINK", stats_key("server", server), STATS .. ":failed:server:" .. server)
    redis.call("HDEL", META, "failures:" .. server)
  end
end

-- Whether jobs wait under a model that has just gone from here: a process whose catalog was old put them in.
-- By now its name may mean a model of another fleet.
local function has_strays(changed)
  for rule in pairs(changed) do
    local model = string.match(rule, "^model (.*)$")
    local waiting = model and tonumber(redis.call("HGET", META, "waiting:" .. model) or "0") or 0
    if waiting > 0 and redis.call("HEXISTS", RULES, rule) == 0 then return true end
  end
  return false
end

-- How many leases each server holds, and how many of them it has no slot for.
local function count_leases()
  local taken, excess = {}, {}
  for _, server in ipairs(redis.call("HKEYS", SERVERS)) do taken[server] = 0 end
  for _, slot in ipairs(redis.call("HKEYS", SLOTS)) do
    local server = server_of(slot)
    local beside = redis.call("LLEN", beside_key(slot))
    if taken[server] then taken[server] = taken[server] + 1 + beside end
    local without = beside + (is_beyond(slot) and 1 or 0)
    if without > 0 then excess[server] = (excess[server] or 0) + without end
  end
  for server, count in pairs(taken) do
    local stats = stats_key("server", server)
    if tonumber(redis.call("HGET", stats, "taken") or "0") ~= count then redis.call("HSET", stats, "taken", count) end
  end
  redis.call("DEL", excess_key())
  for server, count in pairs(excess) do redis.call("HSET", excess_key(), server, count) end
  set_field(META, "excess", next(excess) and "1" or false)
end

-- The same of a model that is gone.
local function forget_model(model)
  redis.call("UNLINK", tags_key(model), stats_key("model", model), STATS .. ":failed:model:" .. model)
  for _, server in ipairs(redis.call("HKEYS", SERVERS)) do
    local stats = stats_key("server", server)
    redis.call("HDEL", stats, "run_ms:" .. model)
    if redis.call("HGET", stats, "loaded") == model then redis.call("HDEL", stats, "loaded") end
  end
end

-- A rule's text was `old` and is `new`, "": there is none.
local function note_change(rule, old, new)
  local kind, name = string.match(rule, "^(%a+) (.*)$")
  if kind == "account" then reweigh(name, old, new) end
  if kind == "model" and new == "" then forget_model(name) end
  if kind == "model" and first_word(old, "") ~= first_word(new, "") then forget_charges(name, old, new) end
end

-- The kinds of servers are others than before: each class has to be held against them again.
local function note_kinds(kinds)
  local before, known = redis.call("HKEYS", KINDS), 0
  for _, kind in ipairs(before) do known = known + (kinds[kind] and 1 or 0) end
  local count = 0
  for _ in pairs(kinds) do count = count + 1 end
  if known == #before and known == count then return end
  redis.call("DEL", KINDS)
  for kind, text in pairs(kinds) do redis.call("HSET", KINDS, kind, text) end
  redis.call("DEL", ungrouped_key())
  for _, class in ipairs(redis.call("HKEYS", CLASSES)) do redis.call("RPUSH", ungrouped_key(), class) end
end

local now, newest = now_ms(), tonumber(redis.call("HGET", META, "catalog") or "-1")
if is_foreign(record) then
  redis.call("HDEL", META, "epoch")
  return { "foreign", newest }
end
if newest > version then return { "stale", newest } end

redis.call("HSET", META, "catalog", version)
if record ~= "" then redis.call("HSET", META, "record", record) end
local gone = {}
for _, server in ipairs(redis.call("HKEYS", SERVERS)) do gone[server] = true end
redis.call("DEL", SERVERS)
local wanted, kinds, changed = {}, {}, {}
for _, server in ipairs(servers) do
  redis.call("HSET", SERVERS, server.name, server.entry)
  gone[server.name] = nil
  local kind = string.match(server.entry, "\n.*$")
  kinds[string.sub(redis.sha1hex(kind), 1, 12)] = kind
  for n = 0, server.slots - 1 do
    local slot = server.name .. "-slot" .. n
    if is_online_slot(slot) then wanted[slot] = true end
  end
end
forget_servers(gone)
count_leases()
for _, index in ipairs({ FREE, COOLING }) do
  for _, slot in ipairs(redis.call("ZRANGE", index, 0, -1)) do
    if wanted[slot] then wanted[slot] = nil else redis.call("ZREM", index, slot) end
  end
end
for slot in pairs(wanted) do
  return_slot(slot, now, 0)
end
note_kinds(kinds)

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
for rule, old in pairs(changed) do note_change(rule, old, rules[rule] or "") end
if next(changed) then
  for _, account in ipairs(redis.call("HKEYS", LANES)) do -- of all that have jobs waiting
    local tenant, model = string.match(account, "^([^|]*)|(.*)$")
    if changed["model " .. model] or changed["account " .. account] or changed["tenant " .. tenant] then
      redis.call("RPUSH", unsorted_key(), account)
    end
  end
end
write_fields()
if has_strays(changed) then
  redis.call("HDEL", META, "epoch")
  redis.call("HSET", META, "lost", "1")
end
return { "synced", version }
