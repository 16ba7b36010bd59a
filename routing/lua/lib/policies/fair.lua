-- fair: start-time fair queueing of slot time, by weight.  A tenant's next job starts at the tenant's tag, a virtual
-- time in ms.  Each offer adds the mean slot time of the model, divided by the tenant's weight; the end of the run
-- replaces that by its real time.
-- @include lib/policy
local fair = new_policy("fair")

local tags_read = {}

-- Return the virtual time of a model: the start tag of the job that was offered last.
local function virtual_time(model) return get_number(stats_key("model", model), "virtual") end

-- Return a tenant's tag; nil: it has none.
local function tag_or_nil(tenant, model)
  local account = tenant .. "|" .. model
  if tags_read[account] == nil then
    tags_read[account] = tonumber(redis.call("ZSCORE", tags_key(model), tenant) or nil) or false
  end
  return tags_read[account] or nil
end

local function tag_of(tenant, model) return tag_or_nil(tenant, model) or 0 end

local function start_tag(tenant, model) return math.max(virtual_time(model), tag_of(tenant, model)) end

-- Add to what a tenant has used of a model, in ms of slot time.
local function charge(tenant, model, used_ms, from)
  local weight = weight_and_slot_limit(tenant .. "|" .. model, rules_of(model))
  local tag = from or tag_or_nil(tenant, model) or virtual_time(model)
  tag = tag + used_ms / weight
  redis.call("ZADD", tags_key(model), string.format("%.17g", tag), tenant)
  tags_read[tenant .. "|" .. model] = tag
end

-- Delete tags of tenants that hold no slot and are not ahead of the virtual time.  One offer in eight looks at some of
-- them, at a place that the offer's number chooses, so that tenants that hold slots do not hide the others.
local function forget_tags(model, number)
  local golden, looked_at_once = 0.6180339887498949, 32
  if number * golden % 1 >= 0.125 then return end
  local behind = redis.call("ZCOUNT", tags_key(model), "-inf", string.format("(%.17g", virtual_time(model)))
  if behind == 0 then return end
  local first = number * 7919 % behind
  local tenants, accounts, idle = redis.call("ZRANGE", tags_key(model), first, first + looked_at_once - 1), {}, {}
  for i, tenant in ipairs(tenants) do accounts[i] = tenant .. "|" .. model end
  load_fields(HELD, unpack(accounts))
  for i, account in ipairs(accounts) do
    if not get_field(HELD, account) then
      idle[#idle + 1] = tenants[i]
      tags_read[account] = nil
    end
  end
  if #idle > 0 then redis.call("ZREM", tags_key(model), unpack(idle)) end
end

-- Virtual time advances without a class that few servers can run; a tenant that waits there keeps its place, also when
-- it submits more.
function fair.account_key(lane)
  local since, siblings = virtual_time(lane.model), {}
  for priority = 1, 9 do siblings[priority] = priority .. "|" .. lane.digest .. "|" .. lane.account end
  for _, key in ipairs(redis.call("ZMSCORE", class_key(lane.class), unpack(siblings))) do
    if key then since = math.min(since, tonumber(key)) end
  end
  return math.max(since, tag_of(lane.tenant, lane.model))
end

function fair.account_step(account, rules)
  local run_ms = tonumber(get_field(stats_key("model", model_of(account)), "run_ms") or "1000")
  local weight = weight_and_slot_limit(account, rules)
  return math.max(run_ms, 1) / weight
end

-- A priority orders only the tenant's own jobs, so it does not count among models either.
function fair.priority_among_models() return PRIORITY_OF_ALL end

function fair.charge_offer(lane, number)
  local stats, start = stats_key("model", lane.model), start_tag(lane.tenant, lane.model)
  local charged = get_number(stats, "run_ms")
  set_field(stats, "virtual", string.format("%.17g", start))
  forget_tags(lane.model, number)
  charge(lane.tenant, lane.model, charged, start)
  return charged
end

-- A long run is charged while it lasts; otherwise its tenant would look idle until it ends.
function fair.charge_renewal(lane, used_ms) charge(lane.tenant, lane.model, used_ms) end

function fair.charge_end(lane, used_ms) charge(lane.tenant, lane.model, used_ms) end

-- Use counts by weight, so a new weight changes how far the tenant is ahead.
function fair.reweigh(account, old, new)
  local tenant, model = string.match(account, "^([^|]*)|(.*)$")
  local at, tag = virtual_time(model), tag_of(tenant, model)
  if tag <= at then return end
  redis.call("ZADD", tags_key(model), string.format("%.17g", at + (tag - at) * old / new), tenant)
end

-- When no job waits, there is nothing to share: the next tenant starts without a debt, as after any idle time.
function fair.forget(model)
  redis.call("DEL", tags_key(model))
  tags_read = {}
  set_field(stats_key("model", model), "virtual", false)
end
