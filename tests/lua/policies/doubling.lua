-- doubling: what was accepted first is next, where each tier waits twice as long as the one before it.
local doubling = new_policy("doubling")

function doubling.head_key(tier, _, created, rules) return created + 2 ^ tier * rules.head_start end
