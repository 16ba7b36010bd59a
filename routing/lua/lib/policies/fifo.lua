-- fifo: jobs start in the order of acceptance, whatever their priority.
-- @include lib/policy
local fifo = new_policy("fifo")

function fifo.head_key(_, seq) return seq end

function fifo.priority_among_models() return PRIORITY_OF_ALL end

function fifo.count_before(other, _, seq) return count_accepted_before(other, seq) end
