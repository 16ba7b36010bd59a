-- rules: what is configured for a model, a tenant, and a tenant's use of a model (an account).

local NO_RULES = "- 0 online 0 0 0"
local rules_read = {}

-- All that is configured for an account, in one step.
local function read_rules(lane)
  read_fields(RULES, "account " .. lane.account, "model " .. lane.model, "tenant " .. lane.tenant)
end

-- Of a model: "<policy> <head_start> <state> <tenant_slots> <affinity> <breaker_failures>", times in ms.
local read_rules_text = remembering(function(text)
  local policy, start, state, slots, affinity, failures = string.match(text, "^(%S+) (%d+) (%a+) (%d+) (%d+) (%d+)")
  return { policy = policy, head_start = tonumber(start), state = state, tenant_slots = tonumber(slots),
    affinity = tonumber(affinity), failures = tonumber(failures) }
end)

local function rules_of(model)
  local rules = rules_read[model] or read_rules_text(field(RULES, "model " .. model) or NO_RULES)
  rules_read[model] = rules
  return rules
end

-- A tenant's share of a model, and how many slots it may hold at once (0: any number).
local function terms_of(account, rules)
  local text = field(RULES, "account " .. account)
  if not text then return 1, rules.tenant_slots end
  local weight, slots = string.match(text, "^(%S+) (%d+)")
  return tonumber(weight), tonumber(slots) > 0 and tonumber(slots) or rules.tenant_slots
end

-- Why no job of this account is offered now; nil: nothing is in its way.
local function obstacle(tenant, account, rules)
  local state = field(RULES, "tenant " .. tenant)
  if state == "paused" or state == "frozen" then return "tenant_" .. state end
  local _, limit = terms_of(account, rules)
  if limit > 0 and number_in_field(HELD, account) >= limit then return "tenant_slots" end
end
