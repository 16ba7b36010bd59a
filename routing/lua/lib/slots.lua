-- slots: which slots there are, and which of them can be offered.

-- A server's entry reads "<state> <slots> <weight>\n<model>\n…\n@<attribute>=<value>\n…", so that no script has
-- to parse JSON.  Answers nil unless the server is online.
local function online_server(server)
  local entry = field(SERVERS, server)
  return entry and string.find(entry, "online ", 1, true) == 1 and entry or nil
end

local slots_in = remembering(function(entry) return tonumber(string.match(entry, "^%a+ (%d+)")) end)
local number_of = remembering(function(slot) return tonumber(string.match(slot, "(%d+)$")) end)
local function models_in(entry) return string.gmatch(entry, "\n([^@\n][^\n]*)") end
local function serves_several(entry) return string.find(entry, "\n[^@\n][^\n]*\n[^@\n]") ~= nil end

local function is_online_slot(slot)
  local entry = online_server(server_of(slot))
  return entry and number_of(slot) < slots_in(entry)
end

-- Whether a server that is here has no slot of this number any more: the operator took it away under the lease.
local function is_beyond(slot)
  local entry = field(SERVERS, server_of(slot))
  return entry and number_of(slot) >= slots_in(entry)
end

-- Let a slot be offered: now, or after its cooldown.  One that holds a lease is not, until that is dropped, nor is
-- one of a server that is not online; sync brings it back.  `is_let_go`: it is known to hold none.
local function return_slot(slot, now, cooldown_ms, is_let_go)
  if not is_online_slot(slot) or (not is_let_go and field(SLOTS, slot)) then return end
  if cooldown_ms > 0 then
    redis.call("ZADD", COOLING, exact(now + cooldown_ms), slot)
  else
    redis.call("ZADD", FREE, now, slot)
  end
end

local are_cooldowns_ended

-- Once in a call, which has one time.
local function end_cooldowns(now)
  if are_cooldowns_ended then return end
  local cooled = redis.call("ZRANGEBYSCORE", COOLING, "-inf", now, "LIMIT", 0, 100)
  are_cooldowns_ended = #cooled < 100
  for _, slot in ipairs(cooled) do
    redis.call("ZREM", COOLING, slot)
    return_slot(slot, now, 0)
  end
end
