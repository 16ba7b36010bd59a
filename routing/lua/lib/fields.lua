-- fields: hashes of which a script reads, and changes, several fields.  Each field is read once; what has changed is
-- written at the end of the script, by few commands for each hash: by write_fields.

local hashes = {}
local whole = {}
local stored = {}

-- What is known of a hash: field -> text, or the number that it has become; false: it is not there.
local function fields_of(key)
  local has = hashes[key] or {}
  hashes[key] = has
  return has
end

-- Read these fields in one step, if the first of them is not known.
local function read_fields(key, first, ...)
  local has = fields_of(key)
  if has[first] ~= nil or whole[key] then return end
  local names, found = { first, ... }, redis.call("HMGET", key, first, ...)
  for i = 1, #names do
    if has[names[i]] == nil then has[names[i]] = found[i] end
  end
end

-- All fields of a hash, by name; false or nil: it is not there.
local function read_hash(key)
  if whole[key] then return hashes[key] end
  local has, found = fields_of(key), redis.call("HGETALL", key)
  for i = 1, #found, 2 do
    if has[found[i]] == nil then has[found[i]] = found[i + 1] end
  end
  whole[key] = true
  return has
end

-- What a field says; false or nil: there is none.
local function field(key, name)
  local has = hashes[key] or fields_of(key)
  local says = has[name]
  if says == nil and not whole[key] then
    says = redis.call("HGET", key, name)
    has[name] = says
  end
  return says
end

local function number_in_field(key, name) return tonumber(field(key, name) or 0) end

-- Change a field to a text or a number; false: remove it.
local function set_field(key, name, to)
  local before = field(key, name) or false
  if before == to then return end
  local old = stored[key] or {}
  stored[key], hashes[key][name] = old, to
  if old[name] == nil then old[name] = before end
end

-- Answers the sum.
local function add_to_field(key, name, change)
  local sum = number_in_field(key, name) + change
  set_field(key, name, sum)
  return sum
end

local function forget_hash(key)
  redis.call("UNLINK", key)
  hashes[key], whole[key], stored[key] = {}, true, nil
end

-- Run a command on a hash, of whose fields Lua hands on some thousands at once, and no more.
local function call_in_parts(words)
  for i = 3, #words, 4000 do redis.call(words[1], words[2], unpack(words, i, math.min(i + 3999, #words))) end
end

local function write_fields()
  for key, old in pairs(stored) do
    local has, set, gone = hashes[key], { "HSET", key }, nil
    for name, before in pairs(old) do
      local to = has[name]
      if to and to ~= before and to ~= tonumber(before or nil) then
        set[#set + 1], set[#set + 2] = name, to
      elseif before and not to then
        gone = gone or { "HDEL", key }
        gone[#gone + 1] = name
      end
    end
    call_in_parts(set)
    if gone then call_in_parts(gone) end
  end
end
