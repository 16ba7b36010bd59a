-- order: whose turn it is.  A policy is a pure function from what stands at a lane's head to the lane's key; the
-- smallest key of a model's lanes is next.  Inside a lane order is always that of acceptance (ORDER-1).

-- 2^49 jobs may be accepted before a key could leak into the next tier; nine tiers stay below 2^53.
local TIER_STEP = 2 ^ 49

-- head: tier, seq, created (ms), start (virtual ms: when the tenant's next job would start under a fair share)
local KEY_OF = {
  fifo = function(head) return head.seq end,
  priority = function(head) return head.tier * TIER_STEP + head.seq end,
  -- A tier's head start is worth `step` ms, so a job is overtaken only by what comes within that time.
  aging = function(head, rules) return head.created + head.tier * rules.step end,
  -- Start-time fair queueing.  A tenant's lanes have equal keys, and Redis puts equals in the order of their names,
  -- which begin with the tier: so tiers count inside a tenant.
  fair = function(head) return head.start end,
}

local NO_RULES = "priority 0 online 0 0 0"
local rules_read = {}

-- All that is configured for an account, in one step.
local function read_rules(it)
  read_fields(RULES, "account " .. it.account, "model " .. it.model, "tenant " .. it.tenant)
end

-- What is configured for a model: "<policy> <step> <state> <tenant_slots> <affinity> <breaker_failures>", times in ms.
local function rules_of(model)
  if not rules_read[model] then
    local text = field(RULES, "model " .. model) or NO_RULES
    local policy, step, state, slots, affinity, failures = string.match(text, "^(%a+) (%d+) (%a+) (%d+) (%d+) (%d+)")
    rules_read[model] = { policy = policy, step = tonumber(step), state = state, tenant_slots = tonumber(slots),
      affinity = tonumber(affinity), failures = tonumber(failures) }
  end
  return rules_read[model]
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

-- Virtual time of a model under `fair`: the start tag of the job that was offered last.
local function virtual_time(model) return number_in_field(stats_key("model", model), "virtual") end

local tags_read = {}

-- A tenant's tag; nil: it has none.
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
  local weight = terms_of(tenant .. "|" .. model, rules_of(model))
  local tag = from or tag_or_nil(tenant, model) or virtual_time(model)
  tag = tag + used_ms / weight
  redis.call("ZADD", tags_key(model), string.format("%.17g", tag), tenant)
  tags_read[tenant .. "|" .. model] = tag
end

-- With nobody waiting there is nothing to share: who comes next begins anew, as after any idle time.
local function forget_shares(model)
  redis.call("DEL", tags_key(model))
  tags_read = {}
  set_field(stats_key("model", model), "virtual", false)
end

local LOOK_SHARE, LOOKED_AT_ONCE = 0.125, 32 -- of the offers; tags
local GOLDEN = 0.6180339887498949

-- A tenant that holds nothing and is not ahead of the virtual time needs no tag.  With one offer of eight, whichever
-- numbers the model's offers have, some are looked at, at a place that the number chooses: those who hold slots must
-- not hide the others.
local function forget_tags(model, number)
  if number * GOLDEN % 1 >= LOOK_SHARE then return end
  local behind = redis.call("ZCOUNT", tags_key(model), "-inf", string.format("(%.17g", virtual_time(model)))
  if behind == 0 then return end
  local first = number * 7919 % behind
  local tenants, accounts, idle = redis.call("ZRANGE", tags_key(model), first, first + LOOKED_AT_ONCE - 1), {}, {}
  for i, tenant in ipairs(tenants) do accounts[i] = tenant .. "|" .. model end
  read_fields(HELD, unpack(accounts))
  for i, account in ipairs(accounts) do
    if not field(HELD, account) then
      idle[#idle + 1] = tenants[i]
      tags_read[account] = nil
    end
  end
  if #idle > 0 then redis.call("ZREM", tags_key(model), unpack(idle)) end
end
