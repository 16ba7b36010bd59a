--[[ count_constraints: how many different constraints would wait if jobs of these classes came in.
  Keys: classes, lanes
  Takes
    account: text         "<tenant>|<model>"
    models: [text]        of the fleet
    classes: [text]       of the jobs that have constraints
  Returns
    own: int, all_tenants: int      different ones, of the account and of the fleet
  Writes nothing
  Called by routing/admission/submit_limits.py: LimitContext.count_constraints_command
  Cost O(lanes of the account + models + classes) ]]
-- @include lib/keys

local own, own_count, all_count = {}, 0, redis.call("HLEN", CLASSES)
for _, model in ipairs(models) do all_count = all_count - redis.call("HEXISTS", CLASSES, "|" .. model) end

local function count_own(class)
  if not own[class] then own_count = own_count + 1 end
  own[class] = true
end

for _, mark in ipairs(redis.call("HKEYS", account_lanes_key(account))) do
  local digest = string.match(mark, "|(%w+)$")
  if digest then count_own(digest .. "|" .. model_of(account)) end
end
for _, class in ipairs(classes) do
  if not own[class] then all_count = all_count + 1 - redis.call("HEXISTS", CLASSES, class) end
  count_own(class)
end
return { own_count, all_count }
