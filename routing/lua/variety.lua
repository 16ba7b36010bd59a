--[[ variety: how many different constraints would wait if jobs of these classes came in.
  Keys: classes, lanes
  Takes
    account: text         "<tenant>|<model>"
    classes: [text]       of each job, those that ask for nothing left out
  Returns
    own: int              of the account, none of them twice
    everyones: int
  Writes nothing
  Cost O(lanes of the account + classes asked) ]]
-- @include lib/fleet

local own, own_count, all_count = {}, 0, redis.call("HLEN", CLASSES)

local function count_own(class)
  if not own[class] then own_count = own_count + 1 end
  own[class] = true
end

for _, mark in ipairs(redis.call("HKEYS", marks_key(account))) do
  local digest = string.match(mark, "|(%w+)$")
  if digest then count_own(digest .. "|" .. model_of(account)) end
end
for _, class in ipairs(classes) do
  if not own[class] then all_count = all_count + 1 - redis.call("HEXISTS", CLASSES, class) end
  count_own(class)
end
return { own_count, all_count }
