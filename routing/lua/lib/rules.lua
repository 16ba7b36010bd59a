-- rules: the configuration of models, tenants and accounts (a tenant's use of a model).
-- @include lib/hash_cache
-- @include lib/keys

local rules_read = {}

-- Read all that is configured for an account, with one command.
local function load_rules(lane)
  load_fields(RULES, "account " .. lane.account, "model " .. lane.model, "tenant " .. lane.tenant,
    "slots " .. lane.tenant, "slots ")
end

-- Of a model: "<policy> <head_start> <state> <tenant_slots> <affinity> <breaker_failures>", times in ms.
local parse_rules = memoize(function(text)
  local policy, start, state, slots, affinity, failures = string.match(text, "^(%S+) (%d+) (%a+) (%d+) (%d+) (%d+)")
  return { policy = policy, head_start = tonumber(start), state = state, tenant_slots = tonumber(slots),
    affinity = tonumber(affinity), failures = tonumber(failures) }
end)

local function rules_of(model)
  local rules = rules_read[model] or parse_rules(get_field(RULES, "model " .. model) or "- 0 online 0 0 0")
  rules_read[model] = rules
  return rules
end

-- Return an account's weight, and how many slots it may hold at once (0: any number).
local function weight_and_slot_limit(account, rules)
  local text = get_field(RULES, "account " .. account)
  if not text then return 1, rules.tenant_slots end
  local weight, slots = string.match(text, "^(%S+) (%d+)")
  return tonumber(weight), tonumber(slots) > 0 and tonumber(slots) or rules.tenant_slots
end

-- Return how many slots of the fleet a tenant may hold at once, nil: any number.  A tenant that is so limited has a
-- count of them in HELD, beside those of its accounts.
local function slots_of_tenant(tenant)
  return tonumber(get_field(RULES, "slots " .. tenant) or get_field(RULES, "slots ") or "")
end

local function is_stopped(state) return state == "paused" or state == "frozen" end

-- Return why no job of this account is offered now; nil: nothing of its tenant is in its way.
local function tenant_blocked_by(tenant, account, rules)
  local state = get_field(RULES, "tenant " .. tenant)
  if is_stopped(state) then return "tenant_" .. state end
  local _, limit = weight_and_slot_limit(account, rules)
  if limit > 0 and get_number(HELD, account) >= limit then return "tenant_slots" end
  local most = slots_of_tenant(tenant)
  if most and get_number(HELD, tenant) >= most then return "max_slots" end
end
