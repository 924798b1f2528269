"""The paper's rules over scored calls, in SQL: which stay, how many stay by chance; and the warehouse that shows it."""
