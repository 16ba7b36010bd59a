-- fleet: names for the keys that every script gets, and how names are read.
-- An index and its members go by one rule: the key of a member is <key of the index>:<member>.
local CLASSES, GROUPS, KINDS, LANES, RULES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local FREE, COOLING, SLOTS, LEASES, SERVERS = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local TAGS, STATS, HELD, META = KEYS[11], KEYS[12], KEYS[13], KEYS[14]

local function class_key(class) return CLASSES .. ":" .. class end
local function group_key(group) return GROUPS .. ":" .. group end
local function lane_key(lane) return LANES .. ":" .. lane end
local function marks_key(account) return LANES .. ":" .. account end
local function lease_key(job) return LEASES .. ":" .. job end
local function tags_key(model) return TAGS .. ":" .. model end
local function stats_key(kind, name) return STATS .. ":" .. kind .. ":" .. name end
local function beside_key(slot) return SLOTS .. ":" .. slot end
local function unsorted_key() return META .. ":unsorted" end
local function open_key() return META .. ":open" end
local function ungrouped_key() return META .. ":ungrouped" end
local function excess_key() return META .. ":excess" end
local function model_of(name) return string.match(name, "|([^|]*)$") end

-- Order keys are integers below 2^53; tostring() would round them to 14 digits.  Redis writes a number that it is given
-- with all of its digits.
local function exact(number) return string.format("%.0f", number) end

-- What a text says never changes: a function that knows it of the latest it was asked for, also by earlier calls.
local TEXTS_KEPT = 256
local function remembering(read)
  local known, count = {}, 0
  return function(text)
    if not known[text] then
      if count == TEXTS_KEPT then known, count = {}, 0 end
      known[text], count = read(text), count + 1
    end
    return known[text]
  end
end

-- A lane `<priority>|<digest>|<tenant>|<model>`: its class is `<digest>|<model>`, its account `<tenant>|<model>`.
local read_lane = remembering(function(lane)
  local priority, digest, tenant, model = string.match(lane, "^(%d)|(%w*)|([^|]*)|([^|]*)$")
  return { name = lane, priority = tonumber(priority), mark = priority .. "|" .. digest, digest = digest,
    tenant = tenant, model = model, class = digest .. "|" .. model, account = tenant .. "|" .. model }
end)

local server_of = remembering(function(slot) return string.match(slot, "^(.*)%-slot%d+$") end)

-- Waiting jobs stand in their lane with the moment of their acceptance, which `aging` counts from.
local function member_of(job, created) return job .. "@" .. created end
local function read_member(member)
  local job, created = string.match(member, "^(.*)@(%d+)$")
  return job, tonumber(created)
end
