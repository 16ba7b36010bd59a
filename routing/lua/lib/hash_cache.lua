-- hash_cache: read each field of a hash once in a call, and write the changed fields at its end, by flush_hashes, with
-- few commands for each hash.

-- Here as in all files of lib, a variable without a value or with `{}` lasts one call, and one with another value as
-- long as Redis has the scripts (slotkeeper/redis/script_library.py).
local hashes = {}
local whole = {}
local stored = {}

-- The cached fields of a hash: field -> text, or the number that was set; false: there is no such field.
local function fields_of(key)
  local fields = hashes[key] or {}
  hashes[key] = fields
  return fields
end

-- Read these fields with one command, unless the first of them is cached.
local function load_fields(key, first, ...)
  local fields = fields_of(key)
  if fields[first] ~= nil or whole[key] then return end
  local names, found = { first, ... }, redis.call("HMGET", key, first, ...)
  for i = 1, #names do
    if fields[names[i]] == nil then fields[names[i]] = found[i] end
  end
end

-- Return all fields of a hash by name; false or nil: there is no such field.
local function load_hash(key)
  if whole[key] then return hashes[key] end
  local fields, found = fields_of(key), redis.call("HGETALL", key)
  for i = 1, #found, 2 do
    if fields[found[i]] == nil then fields[found[i]] = found[i + 1] end
  end
  whole[key] = true
  return fields
end

-- Return a field; false or nil: there is no such field.
local function get_field(key, name)
  local fields = hashes[key] or fields_of(key)
  local value = fields[name]
  if value == nil and not whole[key] then
    value = redis.call("HGET", key, name)
    fields[name] = value
  end
  return value
end

local function get_number(key, name) return tonumber(get_field(key, name) or 0) end

-- Set a field to a text or a number; false: delete it.
local function set_field(key, name, value)
  local before = get_field(key, name) or false
  if before == value then return end
  local old = stored[key] or {}
  stored[key], hashes[key][name] = old, value
  if old[name] == nil then old[name] = before end
end

-- Return the sum.
local function increment_field(key, name, change)
  local sum = get_number(key, name) + change
  set_field(key, name, sum)
  return sum
end

local function delete_hash(key)
  redis.call("UNLINK", key)
  hashes[key], whole[key], stored[key] = {}, true, nil
end

-- Run a command on a hash in parts: Lua passes on only some thousand arguments at once.
local function call_in_parts(words)
  for i = 3, #words, 4000 do redis.call(words[1], words[2], unpack(words, i, math.min(i + 3999, #words))) end
end

local function flush_hashes()
  for key, old in pairs(stored) do
    local fields, set, deleted = hashes[key], { "HSET", key }, nil
    for name, before in pairs(old) do
      local value = fields[name]
      if value and value ~= before and value ~= tonumber(before or nil) then
        set[#set + 1], set[#set + 2] = name, value
      elseif before and not value then
        deleted = deleted or { "HDEL", key }
        deleted[#deleted + 1] = name
      end
    end
    call_in_parts(set)
    if deleted then call_in_parts(deleted) end
  end
end
