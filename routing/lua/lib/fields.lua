-- fields: hashes of which a script reads, and changes, several fields.  Each field is read once; what has changed is
-- written at the end of the script, by few commands for each hash: by write_fields.

local hashes = {}
local whole = {}
local stored = {}

-- What is known of a hash: field -> text, false: it is not there.
local function fields_of(key)
  local has = hashes[key]
  if not has then
    has = {}
    hashes[key] = has
  end
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

-- The text of a field; false or nil: there is none.
local function field(key, name)
  local has = hashes[key] or fields_of(key)
  if has[name] == nil and not whole[key] then has[name] = redis.call("HGET", key, name) end
  return has[name]
end

local function number_in_field(key, name) return tonumber(field(key, name) or "0") end

-- Change a field; false: remove it.
local function set_field(key, name, text)
  local before = field(key, name) or false
  if before == text then return end
  local old = stored[key]
  if not old then
    old = {}
    stored[key] = old
  end
  if old[name] == nil then old[name] = before end
  hashes[key][name] = text
end

-- Answers the sum.
local function add_to_field(key, name, change)
  local sum = number_in_field(key, name) + change
  set_field(key, name, exact(sum))
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
    local set, gone = { "HSET", key }, nil
    for name, before in pairs(old) do
      local text = hashes[key][name]
      if text and text ~= before then
        set[#set + 1], set[#set + 2] = name, text
      elseif before and not text then
        gone = gone or { "HDEL", key }
        gone[#gone + 1] = name
      end
    end
    call_in_parts(set)
    if gone then call_in_parts(gone) end
  end
end
