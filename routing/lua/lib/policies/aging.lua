-- aging: jobs start in the order of acceptance, where each step of priority is worth a head start; so a job is
-- overtaken only by jobs that are accepted within that time.
-- @include lib/policy
local aging = new_policy("aging")

function aging.head_key(priority, _, created, rules) return created + priority * rules.head_start end

-- Priorities rise with time, so that one model's jobs do not starve another's.
function aging.priority_among_models(_, key, rules, now)
  return math.max(math.ceil((key - now) / math.max(rules.head_start, 1)), 1)
end
