-- doubling: what was accepted first is next, where each priority waits twice as long as the one before it.
local doubling = new_policy("doubling")

function doubling.head_key(priority, _, created, rules) return created + 2 ^ priority * rules.head_start end
