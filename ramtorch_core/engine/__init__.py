"""Effects: autograd boundaries, visits, and the runtime that follows a plan."""
