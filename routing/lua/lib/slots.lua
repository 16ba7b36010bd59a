-- slots: which slots a fleet has, and which of them can be offered.
-- @include lib/hash_cache
-- @include lib/keys

-- A server's entry is "<state> <slots> <weight>\n<model>\n…\n@<attribute>=<value>\n…", so no script parses JSON.
-- The state of a node that an operator has not stopped is `node`: it is online while it is connected.
-- Returns nil unless the server is online.
local function online_server(server)
  local entry = get_field(SERVERS, server)
  if not entry or string.find(entry, "online ", 1, true) == 1 then return entry or nil end
  return string.find(entry, "node ", 1, true) == 1 and get_field(present_key(), server) and entry or nil
end

local slots_in = memoize(function(entry) return tonumber(string.match(entry, "^%a+ (%d+)")) end)
local number_of = memoize(function(slot) return tonumber(string.match(slot, "(%d+)$")) end)
local function models_in(entry) return string.gmatch(entry, "\n([^@\n][^\n]*)") end
local function serves(entry, model) return string.find(entry, "\n" .. model .. "\n", 1, true) ~= nil end
local function serves_several(entry) return string.find(entry, "\n[^@\n][^\n]*\n[^@\n]") ~= nil end

local function is_online_slot(slot)
  local entry = online_server(server_of(slot))
  return entry and number_of(slot) < slots_in(entry)
end

-- Return whether no registered server has this slot: an operator removed it, or its server, under its lease.
local function is_removed_slot(slot)
  local entry = get_field(SERVERS, server_of(slot))
  return not entry or number_of(slot) >= slots_in(entry)
end

-- Servers of one kind serve the same models and declare the same attributes.
local kind_of = memoize(function(entry) return string.sub(redis.sha1hex(string.match(entry, "\n.*$")), 1, 12) end)

-- A kind of server gets a free slot, or a waiting job that it may run: offers have to look at it.
local function mark_ready(kind) redis.call("ZADD", ready_key(), "NX", get_number(META, "offers"), kind) end

-- A free slot stands in the index of all, and in that of its kind.
local function index_free_slot(slot, kind, since)
  redis.call("ZADD", free_key(kind), since, slot)
  mark_ready(kind)
end

-- Returns whether it was free.
local function remove_free_slot(slot)
  if redis.call("ZREM", FREE, slot) == 0 then return false end
  local entry = get_field(SERVERS, server_of(slot))
  if entry then redis.call("ZREM", free_key(kind_of(entry)), slot) end
  return true
end

-- Let a slot be offered, now or after a cooldown.  A slot that holds a lease is left until that is deleted, and a slot
-- of a server that is not online until sync_catalog adds it.  `holds_no_lease`: this is known.
local function make_slot_available(slot, now, cooldown_ms, holds_no_lease)
  if not is_online_slot(slot) or (not holds_no_lease and get_field(SLOTS, slot)) then return end
  if cooldown_ms > 0 then
    redis.call("ZADD", COOLING, integer_text(now + cooldown_ms), slot)
  else
    redis.call("ZADD", FREE, now, slot)
    index_free_slot(slot, kind_of(get_field(SERVERS, server_of(slot))), now)
  end
end

local are_cooldowns_ended

-- End the cooldowns that are over, once in a call, which has one time.
local function end_cooldowns(now)
  if are_cooldowns_ended then return end
  local cooled = redis.call("ZRANGEBYSCORE", COOLING, "-inf", now, "LIMIT", 0, 100)
  are_cooldowns_ended = #cooled < 100
  for _, slot in ipairs(cooled) do
    redis.call("ZREM", COOLING, slot)
    make_slot_available(slot, now, 0)
  end
end
