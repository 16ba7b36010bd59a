-- keys: names of the keys that every script of a fleet gets, and parsing of names.
-- The key of a member of an index is <key of the index>:<member>.
local CLASSES, GROUPS, KINDS, LANES, RULES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local FREE, COOLING, SLOTS, LEASES, SERVERS = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local TAGS, STATS, HELD, META = KEYS[11], KEYS[12], KEYS[13], KEYS[14]

local function class_key(class) return CLASSES .. ":" .. class end
local function group_key(group) return GROUPS .. ":" .. group end
local function model_groups_key(model) return GROUPS .. ":" .. model end
local function model_kinds_key(model) return KINDS .. ":" .. model end
local function free_key(kind) return FREE .. ":" .. kind end
local function lane_key(lane) return LANES .. ":" .. lane end
local function account_lanes_key(account) return LANES .. ":" .. account end
local function lease_key(job) return LEASES .. ":" .. job end
local function tags_key(model) return TAGS .. ":" .. model end
local function stats_key(kind, name) return STATS .. ":" .. kind .. ":" .. name end
local function displaced_key(slot) return SLOTS .. ":" .. slot end
local function ready_key() return META .. ":ready" end
local function open_offers_key() return META .. ":open" end
local function present_key() return META .. ":present" end
local function excess_key() return META .. ":excess" end
local function accounts_to_reindex_key() return META .. ":unsorted" end
local function classes_to_regroup_key() return META .. ":ungrouped" end
local function model_of(name) return string.match(name, "|([^|]*)$") end

-- Format an integer below 2^53 with all digits; tostring() would round it to 14.  Redis writes a number that it is
-- given with all of its digits.
local function integer_text(number) return string.format("%.0f", number) end

-- Return a function that caches the results of `parse` for the latest 256 texts, also across calls.
local function memoize(parse)
  local cached, count = {}, 0
  return function(text)
    if not cached[text] then
      if count == 256 then cached, count = {}, 0 end
      cached[text], count = parse(text), count + 1
    end
    return cached[text]
  end
end

-- A lane `<priority>|<digest>|<tenant>|<model>`: its class is `<digest>|<model>`, its account `<tenant>|<model>`.
local parse_lane = memoize(function(lane)
  local priority, digest, tenant, model = string.match(lane, "^(%d)|(%w*)|([^|]*)|([^|]*)$")
  return { name = lane, priority = tonumber(priority), mark = priority .. "|" .. digest, digest = digest,
    tenant = tenant, model = model, class = digest .. "|" .. model, account = tenant .. "|" .. model }
end)

local server_of = memoize(function(slot) return string.match(slot, "^(.*)%-slot%d+$") end)
local function slot_name(server, number) return server .. "-slot" .. number end

-- A waiting job is a member of its lane together with the time of its acceptance, from which `aging` counts.
local function lane_member(job, created) return job .. "@" .. created end
local function parse_lane_member(member)
  local job, created = string.match(member, "^(.*)@(%d+)$")
  return job, tonumber(created)
end
