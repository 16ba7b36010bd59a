-- aging: what was accepted first is next, where each tier is worth a head start; so a job is overtaken only by what
-- comes within that time.
local aging = new_policy("aging")

function aging.head_key(tier, _, created, rules) return created + tier * rules.head_start end

-- Tiers go up with time, so that one model's do not starve another's.
function aging.tier_among_models(_, key, rules, now)
  return math.max(math.ceil((key - now) / math.max(rules.head_start, 1)), 1)
end
