-- aging: what was accepted first is next, where each step of priority is worth a head start; so a job is overtaken
-- only by what comes within that time.
local aging = new_policy("aging")

function aging.head_key(priority, _, created, rules) return created + priority * rules.head_start end

-- Priorities go up with time, so that one model's do not starve another's.
function aging.priority_among_models(_, key, rules, now)
  return math.max(math.ceil((key - now) / math.max(rules.head_start, 1)), 1)
end
