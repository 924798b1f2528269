MACRO why_not(unfit, best, delta, tau) AS CASE
    WHEN unfit IS NOT NULL THEN unfit
    WHEN tau IS NULL THEN 'no_threshold'
    WHEN NOT coalesce(delta >= tau, false) THEN 'below_tau_f'
    WHEN NOT best THEN 'not_best_at_position'
END;
